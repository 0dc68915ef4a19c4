// Rotation of queries and keys, and the way of keys and values into their pages: what other operators may call.
#pragma once

#include "common.h"

namespace ropewalk {

// Rotate queries and keys, write keys and values into their pages.
//
// The first 2 * pairs dimensions of a head are rotated, in float32, and rounded once: dimension i with i + pairs, or 2i
// with 2i + 1 if `interleaved`; the others are copied. `cos` and `sin` are float32 [tokens, pairs] without gaps, each
// already multiplied by the attention factor. `slots` is [tokens], page * page_size + offset in the page. `rotated`
// takes the queries and may be `query` itself. Pages hold the rows' number type or int8.
void rotate_and_write(std::int64_t tokens, const Rows& query, const Rows& key, const Rows& value, const float* cos,
                      const float* sin, std::int64_t pairs, bool interleaved, const std::int64_t* slots,
                      const PagedRows& keys, const PagedRows& values, const Rows& rotated);

// Rotate the keys of whole pages once more, from `sources` to `targets` [moved], which may be the same pages.
//
// 2 * pairs dimensions of a head from `offset` on are rotated, in float32, and rounded once, paired as above; the others
// are copied. `cos` and `sin` are float32 [moved, page_size, pairs] without gaps, for each token. No target that differs
// from its source is a source. Pages hold float32 or bfloat16.
void rerotate(std::int64_t moved, const PagedRows& keys, const std::int64_t* sources, const std::int64_t* targets,
              const float* cos, const float* sin, std::int64_t pairs, std::int64_t offset, bool interleaved);

}  // namespace ropewalk
