// Rotation of queries and keys, and the way into the pages: which thread does which tokens.
#include "rotary.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "rotary_kernels.h"

namespace ropewalk {
namespace {

using Int = std::int64_t;

// Numbers that are worth waking another thread for.
constexpr Int kWorthAThread = 1 << 15;

const RotaryKernels& kernels_of(Level level) {
  switch (level) {
#if defined(__x86_64__)
    case Level::amx:
    case Level::avx512_bf16:
      return avx512_bf16::rotary_kernels();
    case Level::avx512:
      return avx512::rotary_kernels();
    case Level::avx2:
      return avx2::rotary_kernels();
#endif
    default:
      return portable::rotary_kernels();
  }
}

void* head_of(const Rows& rows, Int token, Int head) {
  const Int bytes = rows.number == Number::float32 ? 4 : 2;
  return static_cast<char*>(rows.data) + (token * rows.token_stride + head * rows.head_stride) * bytes;
}

}  // namespace

void rotate_and_write(Int tokens, const Rows& query, const Rows& key, const Rows& value, const float* cos,
                      const float* sin, Int pairs, bool interleaved, const Int* slots, const PagedRows& keys,
                      const PagedRows& values, const Rows& rotated) {
  const RotaryKernels& kernels = kernels_of(current_level());
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

}  // namespace ropewalk
