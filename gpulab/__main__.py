"""`python -m gpulab`: the command line."""

from gpulab.cli import main

if __name__ == "__main__":
    main()
