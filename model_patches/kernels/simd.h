// Vectors of the instruction set that a file is compiled for. For the files that are compiled once for each: everything
// is internal to the file, and nothing of the standard library is used, for a shared inline function would be linked in
// from whichever instruction set the linker met first.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef ROPEWALK_LEVEL
#error "defined by build.py for each instruction set"
#endif

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef std::int8_t Bytes __attribute__((vector_size(kWidth)));

#define ROPEWALK_INLINE inline __attribute__((always_inline))
// Before loops over arrays of vectors: only where they are written out can the compiler keep the arrays in registers.
#define ROPEWALK_UNROLL _Pragma("GCC unroll 16")

template <typename Vector>
ROPEWALK_INLINE Vector load_vector(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <typename Vector>
ROPEWALK_INLINE void store_vector(void* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

ROPEWALK_INLINE Floats all(float value) { return value - Floats{}; }
ROPEWALK_INLINE Floats as_floats(Words bits) { return (Floats)bits; }
ROPEWALK_INLINE Words as_words(Floats floats) { return (Words)floats; }
ROPEWALK_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The low halves of words. In x86's own words, like the other conversions here: of the portable expressions the
// compiler makes several instructions for each vector, or one for each lane.
ROPEWALK_INLINE Words words_from(Halves halves) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

ROPEWALK_INLINE Halves low_halves(Words words) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, Halves);
#endif
}

ROPEWALK_INLINE Floats widen(Halves bfloat16) { return as_floats(words_from(bfloat16) << 16); }

// To bfloat16, to the nearest, ties to even; NaN stays NaN.
ROPEWALK_INLINE Halves narrow(Floats floats) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh(floats);
#else
  const Words bits = as_words(floats);
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return low_halves((floats == floats ? rounded : bits | 0x400000u) >> 16);
#endif
}

// A number of the paged memory or of a row, as float32.
ROPEWALK_INLINE float widen(std::uint16_t bfloat16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bfloat16) << 16;
  float number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return number;
}

ROPEWALK_INLINE Floats load(const float* from) { return load_vector<Floats>(from); }
ROPEWALK_INLINE Floats load(const std::uint16_t* from) { return widen(load_vector<Halves>(from)); }
ROPEWALK_INLINE Floats load(const std::int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_vector<__m128i>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load_vector<Bytes>(from), Floats);
#endif
}
ROPEWALK_INLINE void store(float* to, Floats floats) { store_vector(to, floats); }
ROPEWALK_INLINE void store(std::uint16_t* to, Floats floats) { store_vector(to, narrow(floats)); }

// The first `count` numbers, at most kWidth, and zeros after them; nothing beyond them is read or written.
template <typename Element>
ROPEWALK_INLINE Floats load_some(const Element* from, std::int64_t count) {
  if (count >= kWidth) return load(from);
  Element numbers[kWidth] = {};
  for (std::int64_t i = 0; i < count; ++i) numbers[i] = from[i];
  return load(numbers);
}

template <typename Element>
ROPEWALK_INLINE void store_some(Element* to, Floats floats, std::int64_t count) {
  if (count >= kWidth) return store(to, floats);
  Element numbers[kWidth];
  store(numbers, floats);
  for (std::int64_t i = 0; i < count; ++i) to[i] = numbers[i];
}

// Lanes moved by a power of two, for sums and maxima over lanes. The order of additions is fixed by kWidth.
template <int Step>
ROPEWALK_INLINE Floats swapped(Floats floats) {
  Ints order{};
  for (int lane = 0; lane < kWidth; ++lane) order[lane] = lane ^ Step;
  return __builtin_shuffle(floats, order);
}

template <int Step = kWidth / 2>
ROPEWALK_INLINE float sum_of(Floats floats) {
  if constexpr (Step == 0) {
    return floats[0];
  } else {
    return sum_of<Step / 2>(floats + swapped<Step>(floats));
  }
}

template <int Step = kWidth / 2>
ROPEWALK_INLINE float largest_of(Floats floats) {
  if constexpr (Step == 0) {
    return floats[0];
  } else {
    return largest_of<Step / 2>(larger(floats, swapped<Step>(floats)));
  }
}

// Lane i of the result is the sum over the lanes of the i-th vector.
template <int Count = kWidth>
ROPEWALK_INLINE Floats sums_of(const Floats* vectors) {
  if constexpr (Count == 1) {
    return vectors[0];
  } else {
    // Two halves of the vectors, each reduced to lanes that repeat with period Count / 2: keep one half of those from
    // each after adding what lies Count / 2 lanes further on.
    constexpr int kHalf = Count / 2;
    const Floats low = sums_of<kHalf>(vectors), high = sums_of<kHalf>(vectors + kHalf);
    Ints first{}, second{};
    for (int lane = 0; lane < kWidth; ++lane) {
      const int other = (lane & kHalf) ? kWidth : 0;
      first[lane] = other + lane;
      second[lane] = other + (lane ^ kHalf);
    }
    return __builtin_shuffle(low, high, first) + __builtin_shuffle(low, high, second);
  }
}

ROPEWALK_INLINE Ints lanes() {
  Ints numbers{};
  for (int lane = 0; lane < kWidth; ++lane) numbers[lane] = lane;
  return numbers;
}

// 2^x for x <= 0; exactly 1 at 0, and 0 where the result would be below float32's normal range. The polynomials are
// minimax approximations with a relative error of 2e-9, so the error is one of rounding.
ROPEWALK_INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512DQ__)
  const Floats rest = _mm512_reduce_ps(x, 0x01);  // x - floor(x)
  Floats power = all(2.17022549e-4f);
  power = power * rest + 1.24396873e-3f;
  power = power * rest + 9.67884064e-3f;
  power = power * rest + 5.54833412e-2f;
  power = power * rest + 2.40229830e-1f;
  power = power * rest + 6.93147004e-1f;
  power = power * rest + 1.f;
  const Floats raised = _mm512_scalef_ps(power, x);                                     // takes the floor of x
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(-126.f), _CMP_NLT_UQ), raised);  // NaN stays NaN
#else
  const Floats inside = larger(x, all(-150.f));
  const Floats shifted = inside + 12582912.f;  // 1.5 * 2^23: the nearest whole number, in the low bits
  const Floats rest = inside - (shifted - 12582912.f);
  Floats power = all(1.53458124e-4f);
  power = power * rest + 1.33999309e-3f;
  power = power * rest + 9.61848907e-3f;
  power = power * rest + 5.55032864e-2f;
  power = power * rest + 2.40226462e-1f;
  power = power * rest + 6.93147182e-1f;
  power = power * rest + 1.f;
  const Floats raised = as_floats(as_words(power) + (as_words(shifted) << 23));
  return x >= -126.f ? raised : x < -126.f ? Floats{} : x;  // NaN stays NaN
#endif
}

}  // namespace
}  // namespace ropewalk::ROPEWALK_LEVEL
