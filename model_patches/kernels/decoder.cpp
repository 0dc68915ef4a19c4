// A fused decoder as Python holds it: the weights of all layers, and one call for a whole step. Tensors are checked here and
// become plain structures. Computes nothing itself.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

#include "layer.h"

namespace ropewalk {
namespace {

using Int = std::int64_t;
using OptionalTensor = std::optional<at::Tensor>;

class Decoder : public torch::CustomClassHolder {
 public:
  Decoder(Int hidden, Int heads, Int kv_heads, Int head_dim, Int mlp, double epsilon, bool interleaved, bool bfloat16)
      : shape_{hidden,      heads, kv_heads, head_dim, static_cast<float>(epsilon),
               interleaved, bfloat16 ? Number::bfloat16 : Number::float32},
        mlp_(mlp),
        scratch_(shape_, mlp) {}

  void add_layer(const at::Tensor& attention_norm, const OptionalTensor& query_norm, const OptionalTensor& key_norm,
                 const at::Tensor& mlp_norm, const at::Tensor& qkv, const OptionalTensor& qkv_bias, const at::Tensor& output,
                 const OptionalTensor& output_bias, const at::Tensor& gate_up, const OptionalTensor& gate_up_bias,
                 const at::Tensor& down, const OptionalTensor& down_bias, double scale, Int window) {
    const Int hidden = shape_.hidden, attended = shape_.heads * shape_.head_dim;
    DecoderLayer layer{};
    layer.attention_norm = numbers(attention_norm, hidden);
    layer.query_norm = query_norm ? numbers(*query_norm, shape_.head_dim) : nullptr;
    layer.key_norm = key_norm ? numbers(*key_norm, shape_.head_dim) : nullptr;
    layer.mlp_norm = numbers(mlp_norm, hidden);
    layer.qkv = projection(qkv, qkv_bias, hidden, attended + 2 * shape_.kv_heads * shape_.head_dim, 1);
    layer.output = projection(output, output_bias, attended, hidden, 1);
    layer.gate_up = projection(gate_up, gate_up_bias, hidden, mlp_, 2);
    layer.down = projection(down, down_bias, mlp_, hidden, 1);
    layer.scale = static_cast<float>(scale);
    layer.window = window;
    layers_.push_back(layer);
  }

  void set_head(const at::Tensor& norm, const at::Tensor& weight, const OptionalTensor& bias, Int vocabulary) {
    norm_ = numbers(norm, shape_.hidden);
    head_ = projection(weight, bias, shape_.hidden, vocabulary, 1);
  }

  // float32 logits [logits_at, vocabulary]. Layers of one group share slots and a block table; `group_of` names each layer's.
  at::Tensor forward(const at::Tensor& embedded, const at::Tensor& cos, const at::Tensor& sin,
                     const std::vector<at::Tensor>& slots, const at::Tensor& cu_seq_q, const at::Tensor& key_lengths,
                     const std::vector<at::Tensor>& block_tables, const std::vector<Int>& group_of,
                     const at::Tensor& logits_at, const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
                     const std::vector<at::Tensor>& key_scales, const std::vector<at::Tensor>& value_scales,
                     bool deterministic) {
    const Int tokens = embedded.size(0), count = key_lengths.numel();
    TORCH_CHECK(embedded.dim() == 2 && embedded.size(1) == shape_.hidden, "embedded: expected [tokens, hidden]");
    TORCH_CHECK(cos.dim() == 2 && 2 * cos.size(1) <= shape_.head_dim, "cos: expected [tokens, pairs]");
    TORCH_CHECK(keys.size() == layers_.size() && values.size() == layers_.size(), "pages: one of each for each layer");
    TORCH_CHECK(!slots.empty() && slots.size() == block_tables.size(), "slots: one for each block table");
    TORCH_CHECK(group_of.size() == layers_.size(), "group_of: one for each layer");
    for (const Int group : group_of)
      TORCH_CHECK(group >= 0 && group < static_cast<Int>(slots.size()), "a layer is in none of the groups");
    std::vector<DecoderStep> steps;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const at::Tensor& block_table = block_tables[i];
      TORCH_CHECK(block_table.dim() == 2 && block_table.stride(1) == 1 && block_table.size(0) == count &&
                      block_table.scalar_type() == at::kInt,
                  "block_table: expected int32 [sequences, pages]");
      steps.push_back({tokens,
                       data<float>(cos, at::kFloat, tokens * cos.size(1), "cos"),
                       data<float>(sin, at::kFloat, tokens * cos.size(1), "sin"),
                       cos.size(1),
                       data<Int>(slots[i], at::kLong, tokens, "slots"),
                       {count, data<std::int32_t>(cu_seq_q, at::kInt, count + 1, "cu_seq_q"),
                        data<std::int32_t>(key_lengths, at::kInt, count, "key_lengths"),
                        block_table.const_data_ptr<std::int32_t>(), block_table.stride(0)},
                       deterministic});
    }
    std::vector<PagedRows> key_pages, value_pages;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      key_pages.push_back(pages(keys[i], key_scales.empty() ? OptionalTensor() : key_scales[i]));
      value_pages.push_back(pages(values[i], value_scales.empty() ? OptionalTensor() : value_scales[i]));
    }
    for (std::size_t i = 0; i < steps.size(); ++i)
      check_sequences(steps[i], block_tables[i].size(1) * key_pages[0].page_size, keys[0].size(0) * key_pages[0].page_size);
    at::Tensor hidden = at::empty({tokens, shape_.hidden}, embedded.options().dtype(at::kFloat)).copy_(embedded);
    scratch_.reserve(std::max(tokens, logits_at.numel()));
    for (std::size_t i = 0; i < layers_.size(); ++i)
      run_layer(shape_, layers_[i], steps[group_of[i]], key_pages[i], value_pages[i], hidden.mutable_data_ptr<float>(), scratch_);
    return logits(hidden.index_select(0, logits_at));
  }

 private:
  template <typename Element>
  static const Element* data(const at::Tensor& tensor, at::ScalarType type, Int count, const char* name) {
    TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == count, name, ": expected ", count,
                " of type ", type, " without gaps, got ", tensor.scalar_type(), " ", tensor.sizes());
    return tensor.const_data_ptr<Element>();
  }

  const float* numbers(const at::Tensor& tensor, Int count) {
    kept_.push_back(tensor.to(at::kFloat).contiguous());
    return data<float>(kept_.back(), at::kFloat, count, "weights of a norm, or a bias");
  }

  Projection projection(const at::Tensor& packed, const OptionalTensor& bias, Int inputs, Int outputs, Int span) {
    const Int panels = (outputs + kPanelColumns - 1) / kPanelColumns * span;
    const Int depth = (inputs + kDepthStep - 1) / kDepthStep * kDepthStep;
    const bool bfloat16 = shape_.number == Number::bfloat16;
    TORCH_CHECK(packed.scalar_type() == (bfloat16 ? at::kBFloat16 : at::kFloat) && packed.is_contiguous() &&
                    packed.sizes() == at::IntArrayRef({panels, depth * kPanelColumns}),
                "a packed weight has another shape or type");
    kept_.push_back(packed);
    return {{static_cast<const char*>(packed.const_data_ptr()), shape_.number, panels, depth},
            bias ? numbers(*bias, panels * kPanelColumns) : nullptr,
            outputs};
  }

  PagedRows pages(const at::Tensor& tensor, const OptionalTensor& scales) const {
    const bool packed = tensor.scalar_type() == at::kChar;
    TORCH_CHECK(tensor.dim() == 4 && tensor.is_contiguous() && tensor.size(2) == shape_.kv_heads &&
                    tensor.size(3) == shape_.head_dim,
                "expected pages [pages, page_size, kv_heads, head_dim] without gaps");
    TORCH_CHECK(packed || tensor.scalar_type() == (shape_.number == Number::bfloat16 ? at::kBFloat16 : at::kFloat),
                "pages hold ", tensor.scalar_type());
    TORCH_CHECK(packed == scales.has_value() && (!packed || (scales->scalar_type() == at::kHalf && scales->is_contiguous())),
                "int8 goes with scales, and nothing else does");
    return {tensor.data_ptr(),  packed ? static_cast<std::uint16_t*>(scales->data_ptr()) : nullptr,
            packed ? Number::int8 : shape_.number, tensor.size(1), tensor.size(2), tensor.size(3)};
  }

  static void check_sequences(const DecoderStep& step, Int longest, Int slots) {
    const PackedSequences& all = step.sequences;
    TORCH_CHECK(all.cu_seq_q[0] == 0 && all.cu_seq_q[all.count] == step.tokens, "cu_seq_q disagrees with the tokens");
    for (Int i = 0; i < all.count; ++i) {
      const Int asked = all.cu_seq_q[i + 1] - all.cu_seq_q[i];
      TORCH_CHECK(asked >= 0 && asked <= all.key_lengths[i] && all.key_lengths[i] <= longest, "sequence ", i,
                  ": lengths and pages disagree");
    }
    for (Int i = 0; i < step.tokens; ++i) TORCH_CHECK(step.slots[i] >= 0 && step.slots[i] < slots, "a slot is outside the pages");
  }

  at::Tensor logits(const at::Tensor& hidden) {
    const Int rows = hidden.size(0);
    at::Tensor result = at::empty({rows, head_.outputs}, hidden.options());
    const Activations normed = scratch_.normed(rows);
    rms_norm(hidden.const_data_ptr<float>(), rows, shape_.hidden, norm_, shape_.epsilon, shape_.number, scratch_.normed_data(),
             normed.stride);
    linear(normed, head_.weight, head_.bias, head_.outputs, Number::float32, result.data_ptr(), head_.outputs);
    return result;
  }

  DecoderShape shape_;
  Int mlp_;
  DecoderScratch scratch_;
  std::vector<DecoderLayer> layers_;
  const float* norm_ = nullptr;
  Projection head_{};
  std::vector<at::Tensor> kept_;  // what the pointers above point into
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(ropewalk, library) {
  library.class_<Decoder>("Decoder")
      .def(torch::init<Int, Int, Int, Int, Int, double, bool, bool>())
      .def("add_layer", &Decoder::add_layer)
      .def("set_head", &Decoder::set_head)
      .def("forward", &Decoder::forward);
}

}  // namespace ropewalk
