"""`python -m deployments`: what `make serve` runs."""

from deployments.cli import main

if __name__ == "__main__":
    main()
