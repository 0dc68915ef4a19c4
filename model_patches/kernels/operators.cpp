// The operators as torch sees them: tensors are checked here and become plain structures. Computes nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "attention.h"
#include "rotary.h"

namespace ropewalk {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

Number number_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Number::float32;
    case at::kBFloat16:
      return Number::bfloat16;
    case at::kChar:
      return Number::int8;
    default:
      TORCH_CHECK(false, "numbers of type ", tensor.scalar_type(), " are not supported");
  }
}

Rows rows_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 3 && (tensor.size(2) <= 1 || tensor.stride(2) == 1),
              "expected [tokens, heads, dim] with adjacent dimensions of a head");
  const Number number = number_of(tensor);
  TORCH_CHECK(number != Number::int8, "rows are float32 or bfloat16");
  return {tensor.data_ptr(), number, tensor.stride(0), tensor.stride(1), tensor.size(1), tensor.size(2)};
}

PagedRows pages_of(const at::Tensor& data, const OptionalTensor& scales) {
  TORCH_CHECK(data.dim() == 4 && data.is_contiguous(), "expected [pages, page_size, heads, dim] without gaps");
  const Number number = number_of(data);
  TORCH_CHECK(scales.has_value() == (number == Number::int8), "int8 goes with scales, and nothing else does");
  if (scales) {
    TORCH_CHECK(
        scales->scalar_type() == at::kHalf && scales->is_contiguous() && scales->sizes() == data.sizes().slice(0, 3),
        "expected float16 scales [pages, page_size, heads] without gaps");
  }
  return {data.data_ptr(), scales ? static_cast<std::uint16_t*>(scales->data_ptr()) : nullptr,
          number,          data.size(1),
          data.size(2),    data.size(3)};
}

template <typename Element>
const Element* numbers_of(const at::Tensor& tensor, at::ScalarType type, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.sizes() == shape, name, ": expected ",
              type, " ", shape, " without gaps, got ", tensor.scalar_type(), " ", tensor.sizes());
  return tensor.const_data_ptr<Element>();
}

const float* numbers_for_heads(const OptionalTensor& tensor, std::int64_t heads, const char* name) {
  return tensor ? numbers_of<float>(*tensor, at::kFloat, {heads}, name) : nullptr;
}

void check_alike(const PagedRows& keys, const PagedRows& values) {
  TORCH_CHECK(keys.page_size == values.page_size && keys.heads == values.heads && keys.number == values.number,
              "pages of keys and of values are not alike");
}

at::Tensor attention_operator(const at::Tensor& query, const at::Tensor& keys, const OptionalTensor& key_scales,
                              const at::Tensor& values, const OptionalTensor& value_scales, const at::Tensor& cu_seq_q,
                              const at::Tensor& key_lengths, const at::Tensor& block_table, double scale,
                              std::int64_t window, double soft_cap, const OptionalTensor& sinks,
                              const OptionalTensor& slopes, bool deterministic) {
  const Rows rows = rows_of(query);
  const PagedRows key_pages = pages_of(keys, key_scales), value_pages = pages_of(values, value_scales);
  check_alike(key_pages, value_pages);
  TORCH_CHECK(rows.dim == key_pages.dim, "queries and keys differ in size");
  TORCH_CHECK(key_pages.heads > 0 && rows.heads % key_pages.heads == 0, "query heads are no multiple of key heads");
  TORCH_CHECK(scale > 0 && window >= 0 && soft_cap >= 0, "scale must be positive, window and soft cap not negative");
  const std::int64_t count = key_lengths.numel();
  TORCH_CHECK(block_table.dim() == 2 && block_table.stride(1) == 1 && block_table.size(0) == count &&
                  block_table.scalar_type() == at::kInt,
              "block_table: expected int32 [sequences, pages]");
  const PackedSequences sequences{count, numbers_of<std::int32_t>(cu_seq_q, at::kInt, {count + 1}, "cu_seq_q"),
                                  numbers_of<std::int32_t>(key_lengths, at::kInt, {count}, "key_lengths"),
                                  block_table.const_data_ptr<std::int32_t>(), block_table.stride(0)};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t length = sequences.key_lengths[i], asked = sequences.cu_seq_q[i + 1] - sequences.cu_seq_q[i];
    TORCH_CHECK(asked >= 0 && asked <= length && length <= block_table.size(1) * key_pages.page_size, "sequence ", i,
                ": lengths and pages disagree");
  }
  TORCH_CHECK(sequences.cu_seq_q[0] == 0 && sequences.cu_seq_q[count] == query.size(0),
              "cu_seq_q disagrees with the query");
  const at::Tensor output = at::empty({query.size(0), rows.heads, value_pages.dim}, query.options());
  const LogitRules rules{static_cast<float>(scale), window, static_cast<float>(soft_cap),
                         numbers_for_heads(sinks, rows.heads, "sinks"),
                         numbers_for_heads(slopes, rows.heads, "slopes")};
  paged_attention(rows, key_pages, value_pages, sequences, rules, deterministic, rows_of(output));
  return output;
}

void rotary_operator(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& cos,
                     const at::Tensor& sin, bool interleaved, const at::Tensor& slots, const at::Tensor& keys,
                     const OptionalTensor& key_scales, const at::Tensor& values, const OptionalTensor& value_scales,
                     const at::Tensor& rotated) {
  const Rows query_rows = rows_of(query), key_rows = rows_of(key), value_rows = rows_of(value), to = rows_of(rotated);
  const PagedRows key_pages = pages_of(keys, key_scales), value_pages = pages_of(values, value_scales);
  check_alike(key_pages, value_pages);
  const std::int64_t tokens = query.size(0), pairs = cos.size(-1);
  TORCH_CHECK(key.size(0) == tokens && value.size(0) == tokens, "tokens of query, key and value differ in number");
  TORCH_CHECK(key_rows.heads == key_pages.heads && key_rows.dim == key_pages.dim &&
                  value_rows.heads == value_pages.heads && value_rows.dim == value_pages.dim,
              "keys or values do not fit their pages");
  TORCH_CHECK(query_rows.dim == key_rows.dim && 2 * pairs <= key_rows.dim, "heads are smaller than what is rotated");
  TORCH_CHECK(key_rows.number == query_rows.number && value_rows.number == query_rows.number, "number types differ");
  TORCH_CHECK(rotated.sizes() == query.sizes() && to.number == query_rows.number, "`rotated` is not as the query");
  const std::int64_t* const places = numbers_of<std::int64_t>(slots, at::kLong, {tokens}, "slots");
  for (std::int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(places[i] >= 0 && places[i] < keys.size(0) * keys.size(1), "slot ", places[i], " is outside the pages");
  rotate_and_write(tokens, query_rows, key_rows, value_rows, numbers_of<float>(cos, at::kFloat, {tokens, pairs}, "cos"),
                   numbers_of<float>(sin, at::kFloat, {tokens, pairs}, "sin"), pairs, interleaved, places, key_pages,
                   value_pages, to);
}

void rerotate_operator(const at::Tensor& keys, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& cos,
                       const at::Tensor& sin, std::int64_t offset, bool interleaved) {
  const PagedRows pages = pages_of(keys, std::nullopt);
  TORCH_CHECK(pages.number != Number::int8, "keys that are kept as int8 are not re-rotated in place");
  const std::int64_t moved = sources.numel(), pairs = cos.size(-1);
  TORCH_CHECK(offset >= 0 && offset + 2 * pairs <= pages.dim, "heads are smaller than what is rotated");
  const auto* const from = numbers_of<std::int64_t>(sources, at::kLong, {moved}, "sources");
  const auto* const to = numbers_of<std::int64_t>(targets, at::kLong, {moved}, "targets");
  for (std::int64_t i = 0; i < moved; ++i)
    TORCH_CHECK(std::min(from[i], to[i]) >= 0 && std::max(from[i], to[i]) < keys.size(0), "page ", from[i], " or ", to[i],
                " is outside the pool");
  rerotate(moved, pages, from, to, numbers_of<float>(cos, at::kFloat, {moved, pages.page_size, pairs}, "cos"),
           numbers_of<float>(sin, at::kFloat, {moved, pages.page_size, pairs}, "sin"), pairs, offset, interleaved);
}

void limit_operator(std::int64_t level) {
  TORCH_CHECK(level >= 0 && level <= static_cast<std::int64_t>(Level::amx), "no such level");
  limit_level(static_cast<Level>(level));
}

std::int64_t level_operator() { return static_cast<std::int64_t>(current_level()); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(ropewalk, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor? key_scales, Tensor values, Tensor? value_scales, Tensor "
      "cu_seq_q, "
      "Tensor key_lengths, Tensor block_table, float scale, int window, float soft_cap, Tensor? sinks, Tensor? slopes, "
      "bool deterministic) -> Tensor");
  library.def(
      "rotate_and_write(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, bool interleaved, Tensor "
      "slots, "
      "Tensor(a!) keys, Tensor(b!)? key_scales, Tensor(c!) values, Tensor(d!)? value_scales, Tensor(e!) rotated) -> "
      "()");
  library.def(
      "rerotate(Tensor(a!) keys, Tensor sources, Tensor targets, Tensor cos, Tensor sin, int offset, bool interleaved) -> "
      "()");
  library.def("limit_level(int level) -> ()", limit_operator);
  library.def("current_level() -> int", level_operator);
}

TORCH_LIBRARY_IMPL(ropewalk, CPU, library) {
  library.impl("paged_attention", attention_operator);
  library.impl("rotate_and_write", rotary_operator);
  library.impl("rerotate", rerotate_operator);
}

}  // namespace ropewalk
