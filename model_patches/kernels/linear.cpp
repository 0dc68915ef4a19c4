// The packing of weights, and products with them for whoever calls from Python.
//
// Knows tensors and panels. Does not know what model a weight is of.
#include "linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ropewalk {
namespace {

std::int64_t rounded_up(std::int64_t size, std::int64_t step) { return (size + step - 1) / step * step; }

Number number_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kFloat, "expected bfloat16 or float32, got ",
              tensor.scalar_type());
  return tensor.scalar_type() == at::kBFloat16 ? Number::bfloat16 : Number::float32;
}

// Where depth k of a column lies in its panel, in elements from the column's first.
struct PanelOrder {
  std::int64_t column_step;
  std::int64_t pair_step;
  std::int64_t depths;  // that lie side by side

  explicit PanelOrder(Number number)
      : column_step(number == Number::bfloat16 ? 2 : 1), pair_step(column_step * kPanelColumns), depths(column_step) {}
  std::int64_t operator()(std::int64_t k) const { return k / depths * pair_step + k % depths; }
};

// Memory for packed weights, in huge pages where the system gives them: reading through small ones, a core cannot use all of
// its memory's bandwidth. uint8 [bytes], zeros.
at::Tensor reserve(std::int64_t bytes) {
  TORCH_CHECK(bytes > 0, "bytes must be positive");
#if defined(__linux__)
  constexpr std::int64_t kHugePage = 1 << 21;
  const std::int64_t mapped = rounded_up(bytes, kHugePage) + kHugePage;
  void* const memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) {
    char* const first = reinterpret_cast<char*>(rounded_up(reinterpret_cast<std::int64_t>(memory), kHugePage));
    madvise(first, rounded_up(bytes, kHugePage), MADV_HUGEPAGE);  // a wish: without huge pages it is slower, no more
    return at::from_blob(first, {bytes}, [memory, mapped](void*) { munmap(memory, mapped); }, at::kByte);
  }
#endif
  return at::zeros({bytes}, at::kByte);
}

// Panels are made of words of 4 bytes: two depths of bfloat16, or one of float32.
using Word = std::uint32_t;

// The words of one panel from `columns` rows of a matrix, `row_bytes` long and `stride` bytes apart; zeros beyond them.
void pack_panel(const char* rows, std::int64_t columns, std::int64_t row_bytes, std::int64_t stride, std::int64_t words,
                Word* panel) {
  constexpr std::int64_t kLine = 16;  // words that are read from a row at once, so that what is written stays in cache
  for (std::int64_t first = 0; first < words; first += kLine)
    for (std::int64_t column = 0; column < kPanelColumns; ++column) {
      Word line[kLine] = {};
      const std::int64_t begin = first * sizeof(Word);
      if (column < columns && begin < row_bytes)
        std::memcpy(line, rows + column * stride + begin, std::min<std::int64_t>(sizeof line, row_bytes - begin));
      for (std::int64_t word = 0; word < kLine; ++word) panel[(first + word) * kPanelColumns + column] = line[word];
    }
}

// packed [panels, depth * 32], rows of it any distance apart.
void pack(const at::Tensor& weight, const at::Tensor& packed) {
  TORCH_CHECK(weight.dim() == 2 && packed.dim() == 2 && packed.stride(1) == 1 && weight.scalar_type() == packed.scalar_type());
  number_of(weight);
  TORCH_CHECK(packed.size(0) == rounded_up(weight.size(0), kPanelColumns) / kPanelColumns &&
                  packed.size(1) == rounded_up(weight.size(1), kDepthStep) * kPanelColumns,
              "packed has the wrong shape");
  const at::Tensor whole = weight.stride(1) == 1 ? weight : weight.contiguous();
  const std::int64_t element = whole.element_size(), stride = whole.stride(0) * element;
  const std::int64_t words = packed.size(1) * element / (kPanelColumns * static_cast<std::int64_t>(sizeof(Word)));
  const auto* from = static_cast<const char*>(whole.const_data_ptr());
  auto* to = static_cast<char*>(packed.data_ptr());
  at::parallel_for(0, packed.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t panel = begin; panel < end; ++panel)
      pack_panel(from + panel * kPanelColumns * stride, std::min(kPanelColumns, whole.size(0) - panel * kPanelColumns),
                 whole.size(1) * element, stride, words, reinterpret_cast<Word*>(to + panel * packed.stride(0) * element));
  });
}

template <typename Element>
void unpack_from(const at::Tensor& packed, const at::Tensor& ids, const at::Tensor& rows) {
  const PanelOrder place(number_of(packed));
  const auto* from = static_cast<const Element*>(packed.const_data_ptr());
  const auto* id = ids.const_data_ptr<std::int64_t>();
  auto* to = static_cast<Element*>(rows.data_ptr());
  const std::int64_t inputs = rows.size(1);
  at::parallel_for(0, rows.size(0), 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const Element* start =
          from + id[row] / kPanelColumns * packed.stride(0) + id[row] % kPanelColumns * place.column_step;
      for (std::int64_t k = 0; k < inputs; ++k) to[row * inputs + k] = start[place(k)];
    }
  });
}

// Rows of the matrix that was packed: [ids, inputs].
at::Tensor unpack_rows(const at::Tensor& packed, const at::Tensor& ids, std::int64_t inputs) {
  TORCH_CHECK(packed.dim() == 2 && packed.stride(1) == 1 && ids.dim() == 1 && ids.scalar_type() == at::kLong);
  TORCH_CHECK(packed.size(1) == rounded_up(inputs, kDepthStep) * kPanelColumns, "packed has another depth");
  const at::Tensor numbers = ids.contiguous();
  if (numbers.numel() > 0) {
    const auto [least, most] = numbers.aminmax();
    TORCH_CHECK_INDEX(least.item<std::int64_t>() >= 0 && most.item<std::int64_t>() < packed.size(0) * kPanelColumns,
                      "a row is out of range");
  }
  at::Tensor rows = at::empty({numbers.size(0), inputs}, packed.options());
  if (number_of(packed) == Number::bfloat16)
    unpack_from<std::uint16_t>(packed, numbers, rows);
  else
    unpack_from<float>(packed, numbers, rows);
  return rows;
}

// x as products read it: padded with zeros to whole depth and to whole tiles of rows.
at::Tensor padded(const at::Tensor& x, std::int64_t depth) {
  at::Tensor whole = at::zeros({rounded_up(x.size(0), kMultiplyRows), depth}, x.options());
  whole.narrow(0, 0, x.size(0)).narrow(1, 0, x.size(1)).copy_(x);
  return whole;
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         std::int64_t outputs, at::ScalarType dtype) {
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 2 && packed.is_contiguous() && x.scalar_type() == packed.scalar_type());
  const std::int64_t depth = packed.size(1) / kPanelColumns;
  TORCH_CHECK(rounded_up(x.size(1), kDepthStep) == depth && (outputs + kPanelColumns - 1) / kPanelColumns == packed.size(0),
              "x or outputs do not fit the packed weight");
  at::Tensor y = at::empty({x.size(0), outputs}, x.options().dtype(dtype));
  const at::Tensor rows = padded(x, depth);
  at::Tensor added;
  if (bias) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == outputs, "the bias has another size");
    added = at::zeros({packed.size(0) * kPanelColumns}, x.options().dtype(at::kFloat));
    added.narrow(0, 0, outputs).copy_(*bias);
  }
  linear({static_cast<const char*>(rows.const_data_ptr()), x.size(0), depth},
         {static_cast<const char*>(packed.const_data_ptr()), number_of(packed), packed.size(0), depth},
         bias ? added.const_data_ptr<float>() : nullptr, outputs, number_of(y), y.data_ptr(), outputs);
  return y;
}

}  // namespace

const LinearKernels& linear_kernels() {
#if defined(__x86_64__)
  static const LinearKernels tiled = [] {
    LinearKernels kernels = avx512_bf16::linear_kernels();
    kernels.open = amx::open;
    kernels.close = amx::close;
    kernels.multiply_bfloat16 = amx::multiply;
    return kernels;
  }();
  if (current_level() == Level::amx && amx::available()) return tiled;
#endif
  return ROPEWALK_KERNELS_AT(current_level(), linear_kernels);
}

void linear(const Activations& x, const PackedWeight& weight, const float* bias, std::int64_t outputs, Number number, void* y,
            std::int64_t stride) {
  const LinearKernels& kernels = linear_kernels();
  const std::int64_t element = number == Number::bfloat16 ? 2 : 4;
  multiply(x, weight, 1, [&](std::int64_t row, std::int64_t rows, std::int64_t panel, float* sums) {
    const std::int64_t first = panel * kPanelColumns, columns = std::min(kPanelColumns, outputs - first);
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const values = sums + i * kPanelColumns;
      if (bias) kernels.add(bias + first, kPanelColumns, values);
      kernels.round(values, columns, number, static_cast<char*>(y) + ((row + i) * stride + first) * element);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(ropewalk, library) {
  library.def("reserve(int bytes) -> Tensor", reserve);
  library.def("pack(Tensor weight, Tensor(a!) packed) -> ()", pack);
  library.def("unpack_rows(Tensor packed, Tensor ids, int inputs) -> Tensor", unpack_rows);
  library.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs, ScalarType dtype) -> Tensor", packed_linear);
}

}  // namespace ropewalk
