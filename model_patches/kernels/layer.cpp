// Whole decoder layers: which operators run over which buffers. Knows shapes; does not know tensors, nor how any of the
// operators works.
#include "layer.h"

#include "rotary.h"

namespace ropewalk {
namespace {

using Int = std::int64_t;

// Numbers that are worth waking another thread for.
constexpr Int kWorthAThread = 1 << 15;

Int rounded_up(Int size, Int step) { return (size + step - 1) / step * step; }

Int bytes_of(Number number) { return number == Number::bfloat16 ? 2 : 4; }

void add_bias(const float* bias, Int rows, const LinearKernels& kernels, float* sums) {
  for (Int row = 0; row < rows; ++row) kernels.add(bias, kPanelColumns, sums + row * kPanelColumns);
}

// hidden += x Wᵀ + bias
void add_product(const Activations& x, const Projection& projection, float* hidden) {
  const LinearKernels& kernels = linear_kernels();
  multiply(x, projection.weight, 1, [&](Int row, Int rows, Int panel, float* sums) {
    const Int first = panel * kPanelColumns, columns = std::min(kPanelColumns, projection.outputs - first);
    if (projection.bias) add_bias(projection.bias + first, rows, kernels, sums);
    for (Int i = 0; i < rows; ++i)
      kernels.add(sums + i * kPanelColumns, columns, hidden + (row + i) * projection.outputs + first);
  });
}

// gated = silu(x Gᵀ) * (x Uᵀ), panels of G and U in turn
void gate(const Activations& x, const Projection& projection, Number number, char* gated, Int stride) {
  constexpr Int kBlock = kMultiplyRows * kPanelColumns;
  const LinearKernels& kernels = linear_kernels();
  multiply(x, projection.weight, 2, [&](Int row, Int rows, Int pair, float* sums) {
    const Int first = pair * kPanelColumns;
    if (projection.bias) {
      add_bias(projection.bias + 2 * first, rows, kernels, sums);
      add_bias(projection.bias + 2 * first + kPanelColumns, rows, kernels, sums + kBlock);
    }
    kernels.silu_multiply(sums, sums + kBlock, rows, std::min(kPanelColumns, projection.outputs - first), number,
                          gated + (row * stride + first) * bytes_of(number), stride);
  });
}

void norm_heads(const Rows& rows, Int tokens, const float* weight, float epsilon) {
  const LinearKernels& kernels = linear_kernels();
  at::parallel_for(0, tokens, std::max<Int>(1, kWorthAThread / (rows.heads * rows.dim)), [&](Int begin, Int end) {
    for (Int token = begin; token < end; ++token)
      for (Int head = 0; head < rows.heads; ++head) {
        char* const place =
            static_cast<char*>(rows.data) + (token * rows.token_stride + head * rows.head_stride) * bytes_of(rows.number);
        kernels.rms_norm(place, rows.number, weight, rows.dim, epsilon, rows.number, place);
      }
  });
}

// The attention half of a layer, up to what its output projection takes.
void attend(const DecoderShape& shape, const DecoderLayer& layer, const DecoderStep& step, const PagedRows& keys,
            const PagedRows& values, DecoderScratch& scratch) {
  const Int dim = shape.head_dim, columns = layer.qkv.outputs, bytes = bytes_of(shape.number);
  char* const joined = scratch.qkv();
  const Rows query{joined, shape.number, columns, dim, shape.heads, dim};
  const Rows key{joined + shape.heads * dim * bytes, shape.number, columns, dim, shape.kv_heads, dim};
  const Rows value{joined + (shape.heads + shape.kv_heads) * dim * bytes, shape.number, columns, dim, shape.kv_heads, dim};
  if (layer.query_norm) norm_heads(query, step.tokens, layer.query_norm, shape.epsilon);
  if (layer.key_norm) norm_heads(key, step.tokens, layer.key_norm, shape.epsilon);
  rotate_and_write(step.tokens, query, key, value, step.cos, step.sin, step.pairs, shape.interleaved, step.slots, keys, values,
                   query);
  const Activations attended = scratch.attended(step.tokens);
  const Rows output{scratch.attended_data(), shape.number, attended.stride, dim, shape.heads, dim};
  paged_attention(query, keys, values, step.sequences, {layer.scale, layer.window, 0.f, nullptr, nullptr}, step.deterministic,
                  output);
}

}  // namespace

DecoderScratch::DecoderScratch(const DecoderShape& shape, Int mlp)
    : hidden_depth_(rounded_up(shape.hidden, kDepthStep)),
      attended_depth_(rounded_up(shape.heads * shape.head_dim, kDepthStep)),
      mlp_depth_(rounded_up(mlp, kDepthStep)),
      qkv_columns_((shape.heads + 2 * shape.kv_heads) * shape.head_dim),
      element_(bytes_of(shape.number)) {}

void DecoderScratch::reserve(Int tokens) {
  if (tokens <= tokens_) return;
  tokens_ = rounded_up(tokens, kMultiplyRows);
  for (const auto& [buffer, columns] :
       {std::pair{&normed_, hidden_depth_}, {&attended_, attended_depth_}, {&gated_, mlp_depth_}, {&qkv_, qkv_columns_}})
    buffer->assign(static_cast<std::size_t>(tokens_ * columns * element_), 0);
}

void rms_norm(const float* x, Int rows, Int size, const float* weight, float epsilon, Number number, void* to, Int stride) {
  const LinearKernels& kernels = linear_kernels();
  at::parallel_for(0, rows, std::max<Int>(1, kWorthAThread / size), [&](Int begin, Int end) {
    for (Int row = begin; row < end; ++row)
      kernels.rms_norm(x + row * size, Number::float32, weight, size, epsilon, number,
                       static_cast<char*>(to) + row * stride * bytes_of(number));
  });
}

void run_layer(const DecoderShape& shape, const DecoderLayer& layer, const DecoderStep& step, const PagedRows& keys,
               const PagedRows& values, float* hidden, DecoderScratch& scratch) {
  const Int tokens = step.tokens;
  const Activations normed = scratch.normed(tokens), gated = scratch.gated(tokens);
  rms_norm(hidden, tokens, shape.hidden, layer.attention_norm, shape.epsilon, shape.number, scratch.normed_data(),
           normed.stride);
  linear(normed, layer.qkv.weight, layer.qkv.bias, layer.qkv.outputs, shape.number, scratch.qkv(), layer.qkv.outputs);
  attend(shape, layer, step, keys, values, scratch);
  add_product(scratch.attended(tokens), layer.output, hidden);
  rms_norm(hidden, tokens, shape.hidden, layer.mlp_norm, shape.epsilon, shape.number, scratch.normed_data(), normed.stride);
  gate(normed, layer.gate_up, shape.number, scratch.gated_data(), gated.stride);
  add_product(gated, layer.down, hidden);
}

}  // namespace ropewalk
