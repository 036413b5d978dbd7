"""`python -m deployments`: what `make serve` runs."""

from deployments.loopback import stay_on_this_machine

stay_on_this_machine()  # before Ray is imported

from deployments.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
