"""`python -m ssmspec`: the command line, which the package does not import."""

from runpy import run_module

if __name__ == "__main__":
    run_module("ssmspec_cli", run_name="__main__", alter_sys=True)
