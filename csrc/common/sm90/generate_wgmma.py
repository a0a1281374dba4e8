"""Writes wgmma_shapes.inc: a wrapper per shape of `wgmma.mma_async`, since inline PTX lists every register.

Usage: python generate_wgmma.py OUTPUT
"""

import sys
from pathlib import Path

SHAPES = range(16, 257, 16)  # N of m64nNk16
TYPES = {"BFloat16": "bf16", "Float16": "f16"}
OPERANDS_FROM_SHARED = ("Descriptor a", '"l"(a)')
OPERANDS_FROM_REGISTERS = ("const uint32_t (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4)))


def instruction(n: int, dtype: str, *, from_registers: bool) -> str:
    """Returns the function for d (+)= a · b. asm numbers its operands d, a, b, accumulate, major-ness."""
    count = n // 2
    (parameter, operand), size = (OPERANDS_FROM_REGISTERS, 4) if from_registers else (OPERANDS_FROM_SHARED, 1)
    b = count + size
    a_text = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if from_registers else f"%{count}"
    transposed = ("kTransposedB",) if from_registers else ("kTransposedA", "kTransposedB")
    majors = "".join(f", %{b + 2 + i}" for i in range(len(transposed)))
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    template = ", ".join(f"int {name}" for name in transposed)
    immediates = ", ".join(f'"n"({name})' for name in transposed)
    return f"""\
    template <{template}>
    static __device__ __forceinline__ void mma(float (&d)[{count}], {parameter}, Descriptor b,
                                               bool accumulate) {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
            "{{{registers}}}, {a_text}, %{b}, p, 1, 1{majors};\\n}}\\n"
            : {outputs}
            : {operand}, "l"(b), "r"(static_cast<int>(accumulate)), {immediates});
    }}
"""


def wrapper(n: int, name: str, dtype: str) -> str:
    """Returns the struct of one shape and type, with A from shared memory or from registers."""
    functions = "".join(instruction(n, dtype, from_registers=x) for x in (False, True))
    return f"template <> struct Wgmma<{name}, {n}> {{\n{functions}}};\n"


def main() -> None:
    """Writes the file named on the command line."""
    text = "".join(wrapper(n, name, dtype) for n in SHAPES for name, dtype in TYPES.items())
    Path(sys.argv[1]).write_text(f"// Written by generate_wgmma.py.\n{text}")


if __name__ == "__main__":
    main()
