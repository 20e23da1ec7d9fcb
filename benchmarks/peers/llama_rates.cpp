// llama_rates FILE THREADS PROMPT OUTPUT [STREAMS ...]: the rates of llama.cpp, or of ik_llama.cpp
// if it is compiled with -DIK, from the library itself. It measures as llama_bench.py does, and
// prints one JSON object in tokens/s.
//
//   g++ -O2 -std=c++17 -I SOURCE/include -I SOURCE/ggml/include llama_rates.cpp -L BUILD -lllama
//
// ik_llama.cpp repacks the weights while loading, which is its best form.
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

namespace {

constexpr int kBatch = 2048, kWarmup = 64, kBefore = 32, kBeforeStreams = 8;
constexpr int kFirstToken = 300, kEndToken = 40000;  // words, whatever the vocabulary has behind

struct Row {
  int position, sequence;
  bool logits;
};

class Engine {
 public:
  Engine(const char* file, int threads, int context, int sequences) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
#ifdef IK
    of_model.repack_tensors = true;
    of_model.use_mmap = false;
#endif
    llama_model* model = llama_model_load_from_file(file, of_model);
    if (!model) exit(1);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(context);
    params.n_batch = kBatch;
    params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = threads;
    params.n_seq_max = static_cast<uint32_t>(sequences);
#ifndef IK
    params.kv_unified = true;
#endif
    context_ = llama_init_from_model(model, params);
    if (!context_) exit(1);
    batch_ = llama_batch_init(kBatch, 0, 1);
  }

  void clear() {
#ifdef IK
    llama_kv_cache_clear(context_);
#else
    llama_memory_clear(llama_get_memory(context_), true);
#endif
  }

  // Decodes rows of random tokens, and waits for their end.
  void run(const std::vector<Row>& rows) {
    batch_.n_tokens = static_cast<int32_t>(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
      batch_.token[i] = token_(random_);
      batch_.pos[i] = rows[i].position;
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = rows[i].sequence;
      batch_.logits[i] = rows[i].logits;
    }
    if (const int code = llama_decode(context_, batch_)) {
      fprintf(stderr, "llama_decode: %d\n", code);
      exit(1);
    }
    llama_synchronize(context_);
  }

 private:
  llama_context* context_;
  llama_batch batch_;
  std::mt19937 random_{0};
  std::uniform_int_distribution<int> token_{kFirstToken, kEndToken - 1};
};

double seconds(const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

std::vector<Row> prompt(int tokens, int sequence) {
  std::vector<Row> rows;
  for (int i = 0; i < tokens; i++) rows.push_back({i, sequence, i == tokens - 1});
  return rows;
}

// Returns the tokens/s of `streams` sequences together: of the median step.
double decode_rate(Engine& engine, int before, int output, int streams) {
  engine.clear();
  for (int s = 0; s < streams; s++) engine.run(prompt(before, s));
  std::vector<double> each;
  for (int k = 0; k < output; k++) {
    std::vector<Row> rows;
    for (int s = 0; s < streams; s++) rows.push_back({before + k, s, true});
    each.push_back(seconds([&] { engine.run(rows); }));
  }
  std::sort(each.begin(), each.end());
  const size_t n = each.size();
  return 2.0 * streams / (each[(n - 1) / 2] + each[n / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    fprintf(stderr, "usage: llama_rates FILE THREADS PROMPT OUTPUT [STREAMS ...]\n");
    return 2;
  }
  const int threads = atoi(argv[2]), tokens = atoi(argv[3]), output = atoi(argv[4]);
  std::vector<int> streams;
  for (int i = 5; i < argc; i++) streams.push_back(atoi(argv[i]));
  const int most = streams.empty() ? 1 : *std::max_element(streams.begin(), streams.end());
  Engine engine(argv[1], threads, std::max(tokens, (kBefore + output) * most) + kWarmup, most);
  engine.run(prompt(kWarmup, 0));
  printf("{\"decode\": %.3f", decode_rate(engine, kBefore, output, 1));
  engine.clear();
  printf(", \"prefill\": %.3f", tokens / seconds([&] { engine.run(prompt(tokens, 0)); }));
  for (const int n : streams) {
    printf(", \"%d streams\": %.3f", n, decode_rate(engine, kBeforeStreams, output, n));
  }
  printf("}\n");
}
