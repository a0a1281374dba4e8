"""Hashes the sources that decide what the kernels are, to tell which sources a module was built from.

Comments of C++ and CUDA do not count: the kernels are the same with others.

    python cmake/sources_hash.py HEADER          # writes kSourcesHash, unless HEADER has it already

The build puts it into `jaxmagi._cuda`, and the log of the GPU tests compares it with that of the tree.
"""

import hashlib
import re
import sys
from pathlib import Path

SOURCES = ("CMakeLists.txt", "cmake", "csrc", "xla_ffi")
# Files that do not decide what the collectives do: the modules register their handlers, and no more.
_NOT_OF_COLLECTIVES = re.compile(r"cmake/sources_hash\.py|csrc/attention/|xla_ffi/(attention|module)_")

_CODE = (".cc", ".cu", ".cuh", ".h")
_STRING_OR_COMMENT = re.compile(rb'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)

_HEADER = '#pragma once\n\ninline constexpr const char* kSourcesHash = "{}";\n'


def sources_hash(root: Path) -> str:
    """Returns the sha256 of the names and contents of all files of `SOURCES`, except Python's caches."""
    return _hash(root, _files(root))


def collectives_hash(root: Path) -> str:
    """Returns the same of the files alone that decide what the collectives do."""
    return _hash(root, [name for name in _files(root) if not _NOT_OF_COLLECTIVES.match(name)])


def _files(root: Path) -> list[str]:
    paths = (path for name in SOURCES for path in (root / name, *(root / name).rglob("*")) if path.is_file())
    return [path.relative_to(root).as_posix() for path in sorted(paths) if "__pycache__" not in path.parts]


def _hash(root: Path, files: list[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        text = _without_comments(content) if Path(name).suffix in _CODE else content
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _without_comments(code: bytes) -> bytes:
    """Returns C++ without its comments, and without blank lines and the space around line ends."""
    code = _STRING_OR_COMMENT.sub(lambda match: match[1] or b"", code)
    return re.sub(rb"\s*\n\s*", b"\n", code).strip()


def main() -> None:
    """Writes the header, unless it is up to date: then nothing is compiled again."""
    header = Path(sys.argv[1])
    text = _HEADER.format(sources_hash(Path(__file__).resolve().parent.parent))
    if not header.exists() or header.read_text() != text:
        header.write_text(text)


if __name__ == "__main__":
    main()
