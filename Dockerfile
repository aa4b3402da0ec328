# Two images from one file, for a machine with and without an NVIDIA GPU:
#   docker build --target cpu -t weft:cpu .
#   docker build --target cuda -t weft:cuda .
# With Ray in it, for clusters: --build-arg EXTRAS=ray
# Both run as an unprivileged user, keep models and clients' files in /var/lib/weft, and compiled kernels in
# /var/cache/weft. A server that other machines can reach needs a key: WEFT_API_KEY, or a file and WEFT_API_KEY_FILE.

FROM python:3.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all:
WORKDIR /src
RUN python -m venv /opt/weft
ENV PATH=/opt/weft/bin:$PATH
COPY constraints.txt ./
COPY requirements/build.txt requirements/serve.txt requirements/
RUN pip install --require-hashes --no-deps --requirement requirements/build.txt \
    && pip install --require-hashes --no-deps --requirement requirements/serve.txt

# PyTorch's index for CPUs: without it torch brings several gigabytes of CUDA.
FROM build AS build-cpu
RUN pip install --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
ARG EXTRAS=""
RUN if [ "$EXTRAS" = ray ]; then pip install --constraint constraints.txt 'ray[serve]'; fi
COPY pyproject.toml README.md LICENSE ./
COPY weft weft
RUN PIP_ONLY_BINARY='' pip install --no-deps --no-build-isolation . && weft version

# torch of the package index is built for CUDA 13, which needs the driver 580 or newer.
FROM build AS build-cuda
RUN pip install --constraint constraints.txt torch
ARG EXTRAS=""
RUN if [ "$EXTRAS" = ray ]; then pip install --constraint constraints.txt 'ray[serve]'; fi
COPY pyproject.toml README.md LICENSE ./
COPY weft weft
RUN PIP_ONLY_BINARY='' pip install --no-deps --no-build-isolation . && weft version

FROM python:3.12-slim-bookworm AS runtime
RUN groupadd --gid 10001 weft \
    && useradd --uid 10001 --gid weft --home-dir /var/lib/weft --no-create-home --shell /usr/sbin/nologin weft \
    && install --directory --mode 0700 --owner weft --group weft /var/lib/weft /var/cache/weft
ENV PATH=/opt/weft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    WEFT_HOME=/var/lib/weft \
    WEFT_COMPILE_CACHE=/var/cache/weft/compiled \
    WEFT_HOST=0.0.0.0 \
    WEFT_PORT=8000 \
    WEFT_GRPC_PORT=50051 \
    WEFT_LOG_FORMAT=json
VOLUME ["/var/lib/weft", "/var/cache/weft"]
EXPOSE 8000 50051
WORKDIR /var/lib/weft
# Whether the process answers; it needs no key. GET /health, with a key, tells whether requests are taken.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft"]
CMD ["serve"]

FROM runtime AS cuda
# Triton links the launchers of its kernels with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/weft /opt/weft
USER 10001:10001

FROM runtime AS cpu
COPY --from=build-cpu /opt/weft /opt/weft
USER 10001:10001
