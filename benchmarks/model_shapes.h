// The sizes of public models, from their config.json, for the simulator.
#pragma once
#include <cstdint>

namespace cpuserve::simulate {

struct ModelShape {
  const char* name;
  int64_t width, intermediate;
  int32_t layers, q_heads, kv_heads, head_dim;
  bool gated;      // true: gate and up are one matrix; false: the MLP has one input matrix
  int32_t window;  // sliding window of most layers in tokens; 0: no window
  int64_t vocab;

  int64_t qkv() const { return int64_t{q_heads + 2 * kv_heads} * head_dim; }
  int64_t attended() const { return int64_t{q_heads} * head_dim; }
  // The number of weights of a layer. weights() returns the number in all layers.
  int64_t layer_weights() const {
    return width * (qkv() + attended() + (gated ? 3 : 2) * intermediate);
  }
  int64_t weights() const { return layers * layer_weights(); }
};

constexpr ModelShape kModels[] = {
    {"SmolLM2 135M", 576, 1536, 30, 9, 3, 64, true, 0, 49152},
    {"SmolLM2 360M", 960, 2560, 32, 15, 5, 64, true, 0, 49152},
    {"SmolLM2 1.7B", 2048, 8192, 24, 32, 32, 64, true, 0, 49152},
    {"TinyLlama 1.1B", 2048, 5632, 22, 32, 4, 64, true, 0, 32000},
    {"Llama 3.2 1B", 2048, 8192, 16, 32, 8, 64, true, 0, 128256},
    {"Llama 3.2 3B", 3072, 8192, 28, 24, 8, 128, true, 0, 128256},
    {"Llama 2 7B", 4096, 11008, 32, 32, 32, 128, true, 0, 32000},
    {"Llama 3.1 8B", 4096, 14336, 32, 32, 8, 128, true, 0, 128256},
    {"Llama 3.1 70B", 8192, 28672, 80, 64, 8, 128, true, 0, 128256},
    {"Mistral 7B", 4096, 14336, 32, 32, 8, 128, true, 4096, 32000},
    {"Mistral Nemo 12B", 5120, 14336, 40, 32, 8, 128, true, 0, 131072},
    {"Qwen2.5 0.5B", 896, 4864, 24, 14, 2, 64, true, 0, 151936},
    {"Qwen2.5 1.5B", 1536, 8960, 28, 12, 2, 128, true, 0, 151936},
    {"Qwen2.5 3B", 2048, 11008, 36, 16, 2, 128, true, 0, 151936},
    {"Qwen2.5 7B", 3584, 18944, 28, 28, 4, 128, true, 0, 152064},
    {"Qwen2.5 14B", 5120, 13824, 48, 40, 8, 128, true, 0, 152064},
    {"Qwen2.5 32B", 5120, 27648, 64, 40, 8, 128, true, 0, 152064},
    {"Qwen3 0.6B", 1024, 3072, 28, 16, 8, 128, true, 0, 151936},
    {"Qwen3 1.7B", 2048, 6144, 28, 16, 8, 128, true, 0, 151936},
    {"Qwen3 4B", 2560, 9728, 36, 32, 8, 128, true, 0, 151936},
    {"Qwen3 8B", 4096, 12288, 36, 32, 8, 128, true, 0, 151936},
    {"Qwen3 14B", 5120, 17408, 40, 40, 8, 128, true, 0, 151936},
    {"Qwen3 32B", 5120, 25600, 64, 64, 8, 128, true, 0, 151936},
    {"Gemma 2 2B", 2304, 9216, 26, 8, 4, 256, true, 4096, 256000},
    {"Gemma 2 9B", 3584, 14336, 42, 16, 8, 256, true, 4096, 256000},
    {"Gemma 3 1B", 1152, 6912, 26, 4, 1, 256, true, 512, 262144},
    {"Gemma 3 4B", 2560, 10240, 34, 8, 4, 256, true, 1024, 262208},
    {"Phi 3 mini", 3072, 8192, 32, 32, 32, 96, true, 2047, 32064},
    {"Phi 4", 5120, 17920, 40, 40, 10, 128, true, 0, 100352},
    {"OPT 125M", 768, 3072, 12, 12, 12, 64, false, 0, 50272},
    {"OPT 1.3B", 2048, 8192, 24, 32, 32, 64, false, 0, 50272},
    {"OPT 6.7B", 4096, 16384, 32, 32, 32, 128, false, 0, 50272},
};

}  // namespace cpuserve::simulate
