"""`python -m specbatch`: the command line, where no script was installed."""

from specbatch.cli import app

app(prog_name="specbatch")
