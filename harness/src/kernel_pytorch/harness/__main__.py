"""`python -m kernel_pytorch.harness`: the command line, where its script is not on the path."""

from kernel_pytorch.harness.cli import main

if __name__ == "__main__":
    main()
