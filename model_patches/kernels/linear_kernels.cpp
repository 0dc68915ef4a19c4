// Loops over panels, norms and gates in vectors. Compiled once for each instruction set.
//
// Knows how weights lie in their panels. Does not know how many rows or panels there are, or threads.
#include "linear_kernels.h"
#include "simd.h"

namespace ropewalk::ROPEWALK_LEVEL {
namespace {

constexpr int kVectors = kPanelColumns / kWidth;
// Rows whose sums fit into registers.
constexpr int kRows = kWidth == 16 ? 8 : kWidth == 8 ? 2 : 1;
// Depth that float32 sums are taken over before they are added up.
constexpr std::int64_t kSummed = 64;

ROPEWALK_INLINE void prefetch(const void* panel) {
  __builtin_prefetch(static_cast<const char*>(panel) + kPrefetchBytes);
  __builtin_prefetch(static_cast<const char*>(panel) + kPrefetchBytes + 64);
}

template <int Count>
ROPEWALK_INLINE void store_sums(const Floats (&sums)[Count][kVectors], float* out) {
  for (int row = 0; row < Count; ++row)
    for (int v = 0; v < kVectors; ++v) store(out + row * kPanelColumns + kWidth * v, sums[row][v]);
}

template <int Count>
void multiply(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* panel, std::int64_t depth, float* out) {
  Floats sums[Count][kVectors] = {};
  for (std::int64_t k = 0; k < depth; k += 2, panel += 2 * kPanelColumns) {
    prefetch(panel);
#if defined(__AVX512BF16__)
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + kPanelColumns);
#pragma GCC unroll 8
    for (int row = 0; row < Count; ++row) {
      int pair;
      __builtin_memcpy(&pair, x + row * stride + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, both);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, both);
    }
#else
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Words pairs = load_vector<Words>(panel + 2 * kWidth * v);
      const Floats first = as_floats(pairs << 16), second = as_floats(pairs & 0xffff0000u);
#pragma GCC unroll 8
      for (int row = 0; row < Count; ++row) {
        sums[row][v] += first * widen(x[row * stride + k]);
        sums[row][v] += second * widen(x[row * stride + k + 1]);
      }
    }
#endif
  }
  store_sums<Count>(sums, out);
}

// In blocks of depth, for a sum of sums errs less than one long sum.
template <int Count>
void multiply(const float* x, std::int64_t stride, const float* panel, std::int64_t depth, float* out) {
  Floats totals[Count][kVectors] = {};
  for (std::int64_t begin = 0; begin < depth; begin += kSummed) {
    Floats sums[Count][kVectors] = {};
    const std::int64_t end = begin + kSummed < depth ? begin + kSummed : depth;
    for (std::int64_t k = begin; k < end; ++k, panel += kPanelColumns) {
      prefetch(panel);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Floats weights = load(panel + kWidth * v);
#pragma GCC unroll 8
        for (int row = 0; row < Count; ++row) sums[row][v] += weights * x[row * stride + k];
      }
    }
    for (int row = 0; row < Count; ++row)
      for (int v = 0; v < kVectors; ++v) totals[row][v] += sums[row][v];
  }
  store_sums<Count>(totals, out);
}

template <typename Element, int Count>
void multiply_some(const Element* x, std::int64_t stride, std::int64_t rows, const Element* panel, std::int64_t depth,
                   float* out) {
  if constexpr (Count > 0) {
    if (rows == Count) return multiply<Count>(x, stride, panel, depth, out);
    multiply_some<Element, Count - 1>(x, stride, rows, panel, depth, out);
  }
}

template <typename Element>
void multiply_block(const void* x, std::int64_t stride, std::int64_t rows, const void* panel, std::int64_t depth, float* out) {
  const Element* row = static_cast<const Element*>(x);
  for (; rows > 0; rows -= kRows, row += kRows * stride, out += kRows * kPanelColumns)
    multiply_some<Element, kRows>(row, stride, rows < kRows ? rows : kRows, static_cast<const Element*>(panel), depth, out);
}

ROPEWALK_INLINE Floats silu(Floats x) {
  const Floats power = exp2_of((x < 0.f ? x : -x) * 1.44269504f);  // exp(-|x|)
  return x * (x < 0.f ? power : all(1.f)) / (1.f + power);
}

template <typename Element>
void silu_multiply_into(const float* gate, const float* up, std::int64_t rows, std::int64_t columns, Element* to,
                        std::int64_t stride) {
  for (std::int64_t row = 0; row < rows; ++row, to += stride, gate += kPanelColumns, up += kPanelColumns)
    for (std::int64_t column = 0; column < columns; column += kWidth)
      store_some(to + column, silu(load(gate + column)) * load(up + column), columns - column);
}

void silu_multiply(const float* gate, const float* up, std::int64_t rows, std::int64_t columns, Number number, void* to,
                   std::int64_t stride) {
  if (number == Number::bfloat16) return silu_multiply_into(gate, up, rows, columns, static_cast<std::uint16_t*>(to), stride);
  silu_multiply_into(gate, up, rows, columns, static_cast<float*>(to), stride);
}

template <typename From, typename To>
void rms_norm_into(const From* x, const float* weight, std::int64_t size, float epsilon, To* to) {
  Floats squares[4] = {};
  std::int64_t at = 0;
  for (; at + 4 * kWidth <= size; at += 4 * kWidth)
    for (int v = 0; v < 4; ++v) {
      const Floats values = load(x + at + kWidth * v);
      squares[v] += values * values;
    }
  for (; at < size; at += kWidth) {
    const Floats values = load_some(x + at, size - at);
    squares[0] += values * values;
  }
  const float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float scale = 1.f / __builtin_sqrtf(sum / static_cast<float>(size) + epsilon);
  for (at = 0; at < size; at += kWidth)
    store_some(to + at, load_some(x + at, size - at) * scale * load_some(weight + at, size - at), size - at);
}

template <typename From>
void rms_norm_from(const From* x, const float* weight, std::int64_t size, float epsilon, Number number, void* to) {
  if (number == Number::bfloat16) return rms_norm_into(x, weight, size, epsilon, static_cast<std::uint16_t*>(to));
  rms_norm_into(x, weight, size, epsilon, static_cast<float*>(to));
}

void rms_norm(const void* x, Number x_number, const float* weight, std::int64_t size, float epsilon, Number number, void* to) {
  if (x_number == Number::bfloat16)
    return rms_norm_from(static_cast<const std::uint16_t*>(x), weight, size, epsilon, number, to);
  rms_norm_from(static_cast<const float*>(x), weight, size, epsilon, number, to);
}

template <typename Element>
void round_into(const float* x, std::int64_t size, Element* to) {
  for (std::int64_t at = 0; at < size; at += kWidth) store_some(to + at, load_some(x + at, size - at), size - at);
}

void round(const float* x, std::int64_t size, Number number, void* to) {
  if (number == Number::bfloat16) return round_into(x, size, static_cast<std::uint16_t*>(to));
  round_into(x, size, static_cast<float*>(to));
}

void add(const float* x, std::int64_t size, float* sums) {
  for (std::int64_t at = 0; at < size; at += kWidth)
    store_some(sums + at, load_some(sums + at, size - at) + load_some(x + at, size - at), size - at);
}

}  // namespace

const LinearKernels& linear_kernels() {
  static const LinearKernels kernels{nullptr,       nullptr,  multiply_block<std::uint16_t>, multiply_block<float>,
                                     silu_multiply, rms_norm, round,                         add};
  return kernels;
}

}  // namespace ropewalk::ROPEWALK_LEVEL
