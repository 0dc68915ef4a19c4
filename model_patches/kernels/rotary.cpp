// Rotation of queries and keys, the way into the pages and from one page to another: which thread does which tokens.
#include "rotary.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "rotary_kernels.h"

namespace ropewalk {
namespace {

using Int = std::int64_t;

// Numbers that are worth waking another thread for.
constexpr Int kWorthAThread = 1 << 15;

void* head_of(const Rows& rows, Int token, Int head) {
  const Int bytes = rows.number == Number::float32 ? 4 : 2;
  return static_cast<char*>(rows.data) + (token * rows.token_stride + head * rows.head_stride) * bytes;
}

}  // namespace

void rotate_and_write(Int tokens, const Rows& query, const Rows& key, const Rows& value, const float* cos,
                      const float* sin, Int pairs, bool interleaved, const Int* slots, const PagedRows& keys,
                      const PagedRows& values, const Rows& rotated) {
  const RotaryKernels& kernels = ROPEWALK_KERNELS_AT(current_level(), rotary_kernels);
  const Int numbers = std::max<Int>(1, query.heads * query.dim + key.heads * (key.dim + value.dim));
  at::parallel_for(0, tokens, std::max<Int>(1, kWorthAThread / numbers), [&](Int begin, Int end) {
    std::vector<float> head_numbers(static_cast<std::size_t>(std::max(key.dim, value.dim)));
    float* const numbers = head_numbers.data();
    for (Int token = begin; token < end; ++token) {
      const float *const c = cos + token * pairs, *const s = sin + token * pairs;
      for (Int head = 0; head < query.heads; ++head) {
        kernels.rotate(head_of(query, token, head), query.number, query.dim, c, s, pairs, interleaved, numbers);
        kernels.round(numbers, query.dim, rotated.number, head_of(rotated, token, head));
      }
      for (Int head = 0; head < key.heads; ++head) {
        const Int row = slots[token] * key.heads + head;
        kernels.rotate(head_of(key, token, head), key.number, key.dim, c, s, pairs, interleaved, numbers);
        kernels.keep(numbers, keys, row);
        kernels.rotate(head_of(value, token, head), value.number, value.dim, c, s, 0, interleaved, numbers);
        kernels.keep(numbers, values, row);
      }
    }
  });
}

void rerotate(Int moved, const PagedRows& keys, const Int* sources, const Int* targets, const float* cos, const float* sin,
              Int pairs, Int offset, bool interleaved) {
  const RotaryKernels& kernels = ROPEWALK_KERNELS_AT(current_level(), rotary_kernels);
  const Int bytes = keys.number == Number::float32 ? 4 : 2, rotated = 2 * pairs;
  const Int page_bytes = keys.page_size * keys.heads * keys.dim * bytes;
  const Int grain = std::max<Int>(1, kWorthAThread * bytes / page_bytes);
  at::parallel_for(0, moved, grain, [&](Int begin, Int end) {
    std::vector<float> numbers(static_cast<std::size_t>(rotated));
    for (Int move = begin; move < end; ++move) {
      const char* const from = static_cast<const char*>(keys.data) + sources[move] * page_bytes;
      char* const to = static_cast<char*>(keys.data) + targets[move] * page_bytes;
      if (from != to) std::memcpy(to, from, static_cast<std::size_t>(page_bytes));
      for (Int row = 0; row < keys.page_size * keys.heads; ++row) {
        char* const part = to + (row * keys.dim + offset) * bytes;
        const Int wave = (move * keys.page_size + row / keys.heads) * pairs;
        kernels.rotate(part, keys.number, rotated, cos + wave, sin + wave, pairs, interleaved, numbers.data());
        kernels.round(numbers.data(), rotated, keys.number, part);
      }
    }
  });
}

}  // namespace ropewalk
