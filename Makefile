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

quick:  ## the tests that together take less than a minute
	pytest -m quick

test:  ## all tests that a pull request runs
	pytest

lint:  ## formatting, ruff, mypy
	ruff check .
	ruff format --check .
	mypy
	git ls-files -z '*.h' '*.cpp' | xargs -0 clang-format --dry-run -Werror

format:  ## format Python and C++
	ruff format .
	ruff check --fix .
	git ls-files -z '*.h' '*.cpp' | xargs -0 clang-format -i

cpp:  ## build and run the C++ tests in build/
	cmake -S . -B build -G Ninja -DCPUSERVE_TESTS=ON -DCPUSERVE_EXTENSION=OFF
	cmake --build build
	ctest --test-dir build --output-on-failure

bench:  ## token rates of the default model, as shares of what this machine can do
	cpuserve bench throughput smollm2:135m
