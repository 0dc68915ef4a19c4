// The inner loops of rotation for one instruction set. Compiled once for each; see build.py.
#include "rotary_kernels.h"

#include "simd.h"

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

using Int = std::int64_t;
using Half = std::uint16_t;  // bfloat16 bits

constexpr float kLargestInteger = 127.f;
constexpr float kSmallestScale = 6.103515625e-05f;  // of float16's normal range
constexpr float kLargestScale = 65504.f;

ROPEWALK_INLINE float number_of(float number) { return number; }
ROPEWALK_INLINE float number_of(Half bfloat16) { return widen(bfloat16); }

template <typename Element>
void rotate_halves(const Element* head, const float* cos, const float* sin, Int pairs, float* rotated) {
  for (Int i = 0; i < pairs; i += kWidth) {
    const Int count = pairs - i;
    const Floats first = load_some(head + i, count), second = load_some(head + pairs + i, count);
    const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(rotated + i, first * c - second * s, count);
    store_some(rotated + pairs + i, second * c + first * s, count);
  }
}

template <typename Element>
void rotate_neighbours(const Element* head, const float* cos, const float* sin, Int pairs, float* rotated) {
  for (Int i = 0; i < pairs; ++i) {
    const float first = number_of(head[2 * i]), second = number_of(head[2 * i + 1]);
    rotated[2 * i] = first * cos[i] - second * sin[i];
    rotated[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

template <typename Element>
void rotate_head(const Element* head, Int dim, const float* cos, const float* sin, Int pairs, bool interleaved,
                 float* rotated) {
  if (interleaved)
    rotate_neighbours(head, cos, sin, pairs, rotated);
  else
    rotate_halves(head, cos, sin, pairs, rotated);
  for (Int i = 2 * pairs; i < dim; i += kWidth) store_some(rotated + i, load_some(head + i, dim - i), dim - i);
}

void rotate(const void* head, Number number, Int dim, const float* cos, const float* sin, Int pairs, bool interleaved,
            float* rotated) {
  if (number == Number::float32)
    rotate_head(static_cast<const float*>(head), dim, cos, sin, pairs, interleaved, rotated);
  else
    rotate_head(static_cast<const Half*>(head), dim, cos, sin, pairs, interleaved, rotated);
}

void round(const float* head, Int dim, Number number, void* to) {
  if (number == Number::float32) {
    __builtin_memcpy(to, head, dim * sizeof(float));
    return;
  }
  for (Int i = 0; i < dim; i += kWidth) store_some(static_cast<Half*>(to) + i, load_some(head + i, dim - i), dim - i);
}

// To float16 bits, to the nearest, ties to even; for numbers of its normal range.
ROPEWALK_INLINE Half half_bits(float scale) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof bits);
  bits += 0xfffu + ((bits >> 13) & 1u);
  return static_cast<Half>((bits >> 13) - (112u << 10));
}

ROPEWALK_INLINE float half_number(Half bits) {
  const std::uint32_t moved = (static_cast<std::uint32_t>(bits) << 13) + (112u << 23);
  float number;
  __builtin_memcpy(&number, &moved, sizeof number);
  return number;
}

void quantise(const float* head, Int dim, std::int8_t* integers, Half* scale) {
  Floats sizes{};
  for (Int i = 0; i < dim; i += kWidth) {
    const Floats numbers = load_some(head + i, dim - i);
    sizes = larger(sizes, larger(numbers, -numbers));
  }
  const float wanted = largest_of(sizes) / kLargestInteger;
  *scale = half_bits(wanted < kSmallestScale ? kSmallestScale : wanted > kLargestScale ? kLargestScale : wanted);
  const Floats divisor = all(half_number(*scale));
  for (Int i = 0; i < dim; i += kWidth) {
    Floats numbers = load_some(head + i, dim - i) / divisor;
    numbers = numbers > kLargestInteger    ? all(kLargestInteger)
              : numbers < -kLargestInteger ? all(-kLargestInteger)
                                           : numbers;
    const Floats whole = (numbers + 12582912.f) - 12582912.f;  // 1.5 * 2^23: to the nearest, ties to even
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Ints), Bytes);
    __builtin_memcpy(integers + i, &bytes, dim - i < kWidth ? dim - i : kWidth);
  }
}

void keep(const float* head, const PagedRows& pages, Int row) {
  const Int offset = row * pages.dim;
  switch (pages.number) {
    case Number::float32:
      return round(head, pages.dim, pages.number, static_cast<float*>(pages.data) + offset);
    case Number::bfloat16:
      return round(head, pages.dim, pages.number, static_cast<Half*>(pages.data) + offset);
    case Number::int8:
      return quantise(head, pages.dim, static_cast<std::int8_t*>(pages.data) + offset, pages.scales + row);
  }
}

}  // namespace

const RotaryKernels& rotary_kernels() {
  static constexpr RotaryKernels kernels{rotate, round, keep};
  return kernels;
}

}  // namespace ropewalk::ROPEWALK_LEVEL
