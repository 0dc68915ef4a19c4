// Whole decoder layers of the Llama kind: the shape of a layer and the way through it.
//
// A layer is x + output(attention(rotate(qkv(norm(x))))), then that + down(silu(gate) * up) of its norm (Llama 2, 2307.09288,
// 2.2); norms are RMSNorm (1910.07467, eq. 4), optionally also over each head of queries and keys (Qwen3).
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"

namespace ropewalk {

// A product y = x Wᵀ + bias. The bias is padded to whole panels with zeros, and null where there is none.
struct Projection {
  PackedWeight weight;
  const float* bias;
  std::int64_t outputs;
};

struct DecoderLayer {
  const float* attention_norm;  // [hidden]
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;        // likewise
  const float* mlp_norm;        // [hidden]
  Projection qkv;               // outputs: heads of queries, of keys, of values
  Projection output;
  Projection gate_up;  // panels of gate and of up in turn; outputs: of gate alone
  Projection down;
  float scale;          // of the softmax
  std::int64_t window;  // how many of the latest tokens are seen; 0 for all
};

// What all layers share.
struct DecoderShape {
  std::int64_t hidden;
  std::int64_t heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
  float epsilon;     // of all norms
  bool interleaved;  // which dimensions are rotated together, see rotary.h
  Number number;     // of weights and activations; the residual stream is float32
};

// One step's tokens, packed.
struct DecoderStep {
  std::int64_t tokens;
  const float* cos;  // [tokens, pairs]
  const float* sin;
  std::int64_t pairs;
  const std::int64_t* slots;  // [tokens]
  PackedSequences sequences;
  bool deterministic;  // see attention.h
};

// Memory for what a layer computes on its way, kept between steps. Every buffer of activations is 0 beyond the columns that
// are written, as products need it.
class DecoderScratch {
 public:
  DecoderScratch(const DecoderShape& shape, std::int64_t mlp);
  void reserve(std::int64_t tokens);

  Activations normed(std::int64_t rows) const { return {normed_.data(), rows, hidden_depth_}; }
  Activations attended(std::int64_t rows) const { return {attended_.data(), rows, attended_depth_}; }
  Activations gated(std::int64_t rows) const { return {gated_.data(), rows, mlp_depth_}; }
  char* qkv() { return qkv_.data(); }
  char* normed_data() { return normed_.data(); }
  char* attended_data() { return attended_.data(); }
  char* gated_data() { return gated_.data(); }

 private:
  std::int64_t hidden_depth_, attended_depth_, mlp_depth_, qkv_columns_, element_;
  std::int64_t tokens_ = 0;
  std::vector<char> normed_, attended_, gated_, qkv_;
};

// `hidden` float32 [tokens, shape.hidden] becomes what the layer makes of it; keys and values go into their pages.
void run_layer(const DecoderShape& shape, const DecoderLayer& layer, const DecoderStep& step, const PagedRows& keys,
               const PagedRows& values, float* hidden, DecoderScratch& scratch);

// to [rows, stride] = RMSNorm of x [rows, size].
void rms_norm(const float* x, std::int64_t rows, std::int64_t size, const float* weight, float epsilon, Number number, void* to,
              std::int64_t stride);

}  // namespace ropewalk
