"""`python -m tests.faults`: the chaos run. Imports nothing by itself, because each forked process imports this module again."""

if __name__ == "__main__":
    from tests.faults.chaos import main

    main()
