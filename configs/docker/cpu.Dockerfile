# jaxinfer for processors, with the native kernels. From the root of the repository:
#   docker build -f configs/docker/cpu.Dockerfile -t jaxinfer:0.1.0-cpu .
FROM python:3.12.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/jaxinfer
ENV PATH=/opt/jaxinfer/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY pallas_kernels pallas_kernels
COPY sharding sharding
COPY jaxinfer jaxinfer
COPY serve serve
# Without a compiler the package would install too, only slower; here that is an error.
RUN pip install ".[otel]" \
    && ls /opt/jaxinfer/lib/python3*/site-packages/pallas_kernels/native/*.so

FROM python:3.12.12-slim-bookworm
RUN groupadd --gid 10001 jaxinfer \
    && useradd --uid 10001 --gid 10001 --create-home jaxinfer \
    && install --directory --owner 10001 --group 10001 /cache
COPY --from=build /opt/jaxinfer /opt/jaxinfer
ENV PATH=/opt/jaxinfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    JAX_PLATFORMS=cpu \
    HF_HOME=/cache/huggingface \
    JAXINFER_COMPILE__CACHE_DIR=/cache/xla
VOLUME /cache
WORKDIR /home/jaxinfer
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["jaxinfer"]
CMD ["serve", "--config", "/etc/jaxinfer/config.yaml", "--host", "0.0.0.0", "--port", "8000"]
