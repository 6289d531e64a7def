# syntax=docker/dockerfile:1
# Two images: `service` (API, reconciler, migrations; small) and `worker` (the same with vLLM for NVIDIA GPUs).

FROM python:3.11-slim AS wheel
RUN pip install --no-cache-dir build
WORKDIR /src
COPY . .
RUN python -m build --wheel --outdir /wheels

FROM python:3.11-slim AS base
RUN useradd --create-home --uid 10001 specbatch \
    && install --directory --owner specbatch --mode 0700 /var/lib/specbatch /home/specbatch/.cache
ENV SPECBATCH_DATA_DIR=/var/lib/specbatch \
    SPECBATCH_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/specbatch
ENTRYPOINT ["specbatch"]

FROM base AS service
COPY constraints.txt /tmp/constraints.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl
USER specbatch
EXPOSE 8000
CMD ["api"]

FROM base AS worker
# Triton compiles its launchers when a model first runs, and needs a C compiler for it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# constraints.txt pins the CPU's torch: the GPU's versions follow from vLLM's own pins.
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[gpu]"
USER specbatch
CMD ["worker"]
