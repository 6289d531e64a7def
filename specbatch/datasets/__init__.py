"""Datasets in and out: rows of JSONL, CSV, Parquet and Hugging Face folders, templates over their columns, and files that appear whole."""
