# Commands for contributors. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup kernels quick test lint format cpp bench

help:  ## list these commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup:  ## an editable install with test and lint tools, and the git hooks
	pip install 'scikit-build-core>=0.10' 'pybind11>=2.12' cmake ninja pre-commit
	pip install --no-build-isolation -e '.[test,lint]'
	pre-commit install

kernels:  ## compile the kernels of this checkout again
	pip install --no-build-isolation --no-deps -e .

quick:  ## tests of config, platforms, quant, sampling, serving, tokenizer: about a minute
	pytest -m quick

test:  ## all tests that a pull request runs
	pytest

lint:  ## formatting, ruff, mypy, clang-format, shell, Dockerfile, workflows, spelling
	ruff check .
	ruff format --check .
	mypy
	git ls-files -z '*.h' '*.cpp' | xargs -0 clang-format --dry-run -Werror
	shellcheck --severity=warning .ci/run deploy/bundle.sh
	hadolint Dockerfile.cpu
	actionlint .github/workflows/*.yml
	git ls-files -z ':!tests' | xargs -0 codespell

format:  ## format Python and C++
	ruff format .
	ruff check --fix .
	git ls-files -z '*.h' '*.cpp' | xargs -0 clang-format -i

cpp:  ## build and run the C++ tests in build/cpp
	cmake -S . -B build/cpp -G Ninja -DCPUSERVE_TESTS=ON -DCPUSERVE_EXTENSION=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	cmake --build build/cpp
	ctest --test-dir build/cpp --output-on-failure

bench:  ## token rates of the default model, as shares of what this machine can do
	cpuserve bench throughput smollm2:135m
