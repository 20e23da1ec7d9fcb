// llama_replay FILE THREADS PROMPT: feeds the tokens of bench_experts.py --record (on stdin, a line
// of "w" or "m" and ids for each request) to llama.cpp, or to ik_llama.cpp with its reads ahead
// if it is compiled with -DIK. replay.py starts it in limited memory. Prints the tokens/s and the
// bytes read from disks a token of the requests marked "m", and of a prompt of PROMPT tokens.
//
//   g++ -O2 -std=c++17 -I SOURCE/include -I SOURCE/ggml/include llama_replay.cpp -L BUILD -lllama
#include <llama.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kBatch = 2048;

llama_context* load(const char* file, int threads) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model_params of_model = llama_model_default_params();
  of_model.n_gpu_layers = 0;
#ifdef IK
  of_model.defer_experts = true;
#else
  of_model.load_mode = LLAMA_LOAD_MODE_MMAP;
  of_model.use_extra_bufts = false;  // or it copies all weights into another layout
#endif
  llama_model* model = llama_model_load_from_file(file, of_model);
  if (!model) exit(1);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = kBatch;
  params.n_ubatch = 1024;
  params.n_threads = params.n_threads_batch = threads;
#ifdef IK
  params.prefetch_experts = true;
  params.flash_attn = false;
#endif
  llama_context* context = llama_init_from_model(model, params);
  if (!context) exit(1);
  return context;
}

void clear(llama_context* context) {
#ifdef IK
  llama_kv_cache_clear(context);
#else
  llama_memory_clear(llama_get_memory(context), true);
#endif
}

void decode(llama_context* context, const std::vector<int>& ids, int first) {
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  batch.n_tokens = static_cast<int32_t>(ids.size());
  for (size_t i = 0; i < ids.size(); i++) {
    batch.token[i] = ids[i];
    batch.pos[i] = first + static_cast<int>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = i + 1 == ids.size();
  }
  if (llama_decode(context, batch)) exit(1);
  llama_synchronize(context);
  llama_batch_free(batch);
}

int64_t disk_bytes() {
  std::ifstream file("/proc/self/io");
  for (std::string name, value; file >> name >> value;) {
    if (name == "read_bytes:") return std::stoll(value);
  }
  return 0;
}

void report(const char* what, size_t tokens, const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  const int64_t before = disk_bytes();
  work();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  const auto count = static_cast<double>(tokens);
  printf("{\"%s_tokens_per_s\": %.4f, \"mb_per_token\": %.1f, \"gb\": %.2f, \"seconds\": %.1f}\n",
         what, count / seconds, static_cast<double>(disk_bytes() - before) / count / 1e6,
         static_cast<double>(disk_bytes() - before) / 1e9, seconds);
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: llama_replay FILE THREADS PROMPT < RECORD\n");
    return 2;
  }
  llama_context* context = load(argv[1], atoi(argv[2]));
  printf("loaded\n");
  fflush(stdout);
  std::vector<std::vector<int>> warm, measured;
  for (std::string line; std::getline(std::cin, line);) {  // begins when replay.py writes
    std::istringstream words(line);
    std::string mark;
    words >> mark;
    std::vector<int> ids;
    for (int id; words >> id;) ids.push_back(id);
    (mark == "w" ? warm : measured).push_back(ids);
  }
  size_t tokens = 0;
  constexpr int kPrompt = 3;  // tokens of a prompt of bench_experts.py
  const auto run = [&](const std::vector<std::vector<int>>& requests) {
    for (const std::vector<int>& ids : requests) {
      clear(context);
      decode(context, {ids.begin(), ids.begin() + kPrompt}, 0);
      for (size_t i = kPrompt; i + 1 < ids.size(); i++) {
        decode(context, {ids[i]}, static_cast<int>(i));
      }
    }
  };
  report("warm", 1, [&] { run(warm); });
  for (const auto& ids : measured) tokens += ids.size() - kPrompt;
  report("decode", tokens, [&] { run(measured); });
  std::vector<int> prompt;
  const int first = warm.at(0).at(0);
  for (int i = 0; i < atoi(argv[3]); i++) prompt.push_back(first + i * i % 256);
  clear(context);
  if (!prompt.empty()) report("prompt", prompt.size(), [&] { decode(context, prompt, 0); });
}
