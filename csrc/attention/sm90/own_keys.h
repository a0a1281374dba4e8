#pragma once

namespace jaxmagi::sm90 {

// The first of kv_len keys and values where a rank of context attention has them, [batch, length, row_heads, dim].
struct OwnKeys {
    const void *k, *v;
    int length, row_heads;
};

}  // namespace jaxmagi::sm90
