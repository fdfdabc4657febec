"""`python -m ssmspec_cli`."""

from .main import run

if __name__ == "__main__":
    run()
