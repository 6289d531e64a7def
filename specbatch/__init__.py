"""What a batch job is and may become. Imports neither Celery's worker, nor vLLM, nor torch."""
