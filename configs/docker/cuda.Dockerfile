# jaxinfer for NVIDIA GPUs (driver 580 or newer). From the root of the repository:
#   docker build -f configs/docker/cuda.Dockerfile -t jaxinfer:0.1.0-cuda .
# CUDA's libraries come with JAX's wheels, so the base image has none of them.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/jaxinfer
ENV PATH=/opt/jaxinfer/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY pallas_kernels pallas_kernels
COPY sharding sharding
COPY jaxinfer jaxinfer
COPY serve serve
# The native library of the processor is built with the package; it is what runs if the container gets no GPU.
RUN pip install ".[cuda13,otel]" \
    && ls /opt/jaxinfer/lib/python3*/site-packages/pallas_kernels/native/*.so

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 jaxinfer \
    && useradd --uid 10001 --gid 10001 --create-home jaxinfer \
    && install --directory --owner 10001 --group 10001 /cache
COPY --from=build /opt/jaxinfer /opt/jaxinfer
# Weights are downloaded, or mounted; they and compiled programs belong on a volume.
ENV PATH=/opt/jaxinfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/cache/huggingface \
    JAXINFER_COMPILE__CACHE_DIR=/cache/xla
VOLUME /cache
WORKDIR /home/jaxinfer
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# The server listens when the engine is ready, which takes long the first time.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["jaxinfer"]
CMD ["serve", "--config", "/etc/jaxinfer/config.yaml", "--host", "0.0.0.0", "--port", "8000"]
