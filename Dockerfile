# docker build -t quire .                                     for NVIDIA GPUs (serves on CPUs too)
# docker build -t quire --build-arg TORCH_INDEX=URL .         with the wheel index that PyTorch's
#                                                             installation page names for CPU: a
#                                                             fifth of the size
#
# docker run --rm -p 8000:8000 [--gpus all] quire [MODEL] [flags of quire serve]
ARG PYTHON=3.11
ARG DEBIAN=bookworm

FROM python:${PYTHON}-slim-${DEBIAN} AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH

# What changes least comes first: the compiler and torch, the other libraries, our own code.
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml ./
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['otel'], *extras['video'], sep='\n')" \
    > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY kernels kernels
# The kernels for CPUs, for every kind of processor: the image that serves has no compiler.
RUN python -m kernels.cpu.native.build --here
COPY engine engine
COPY loadtest loadtest
COPY demo demo
COPY server server
COPY tools tools
RUN pip install --no-deps . && python -m compileall -q /opt/quire/lib

FROM python:${PYTHON}-slim-${DEBIAN}
RUN useradd --create-home --uid 10001 quire && install -d -o quire -g root -m 0775 /models /data /home/quire/.triton
COPY --from=build /opt/quire /opt/quire
# Triton, which comes with the CUDA build of torch, compiles its link to the driver where it runs.
# (The headers of Python are in the image already.)
RUN if [ -d /opt/quire/lib/python*/site-packages/triton ]; then \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; fi
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models QUIRE_DATA_DIR=/data PYTHONUNBUFFERED=1
USER quire
WORKDIR /home/quire
EXPOSE 8000
# Green as soon as the process answers, also while it downloads or loads a model. Who must wait for
# the model asks /ready.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0"]
