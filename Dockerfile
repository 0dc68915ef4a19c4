# docker build --target cpu -t ropewalk:cpu .
# docker build --target cuda -t ropewalk:cuda .
# What each needs, and what it may write: docs/deploy.md.
#
# Plain Debian rather than the python image: its packages are listed in dpkg's database, which SBOM scanners read and
# security updates go through, and a mirror or a base of your own (--build-arg BASE=…) is the same distribution.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/ropewalk
# pip trusts whom Debian trusts rather than a list of its own, so that BASE can bring the certificate of a proxy.
ENV PATH=/opt/ropewalk/bin:$PATH \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
COPY constraints.txt pyproject.toml ./
# With the extra otel, which an operator switches on by a setting, or those asked for (EXTRAS="otel ray"); what is for
# measuring and testing stays out.
ARG EXTRAS=otel
RUN python -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print('\n'.join(sum((p['optional-dependencies'][extra] for extra in sys.argv[1:]), p['dependencies'])))" \
    $EXTRAS > requirements.txt

# torch has an index of its own for each kind of device; PyPI's is the CUDA build, several GB.
FROM build AS install-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
    "$(grep '^torch==' constraints.txt)+cpu"
RUN pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY model_patches model_patches
COPY service service
RUN pip install --constraint constraints.txt --no-deps .
# The default model and the operators are part of the image: it starts without a network, in seconds, and its digest
# says which weights and which machine code it runs.
RUN ROPEWALK_CACHE=/usr/share/ropewalk ropewalk fetch-default
RUN ROPEWALK_CACHE=/usr/share/ropewalk ropewalk build-operators

FROM build AS install-cuda
RUN pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY model_patches model_patches
COPY service service
RUN pip install --constraint constraints.txt --no-deps .
COPY --from=install-cpu /usr/share/ropewalk/models /usr/share/ropewalk/models
RUN ROPEWALK_CACHE=/usr/share/ropewalk ropewalk build-operators

FROM python AS runtime
COPY deploy/image/entrypoint.sh /usr/local/bin/ropewalk-entrypoint
# Any UID may run it, as long as its group is 0: that is what OpenShift gives, and what a fresh volume then has too.
RUN install --directory --owner 10001 --group 0 --mode 2775 /var/cache/ropewalk
# A UID without an entry in /etc/passwd has no home folder and no name; what is asked for them is answered here.
ENV PATH=/opt/ropewalk/bin:$PATH \
    HOME=/tmp \
    USER=ropewalk \
    PYTHONDONTWRITEBYTECODE=1 \
    IMAGE_CACHE=/usr/share/ropewalk \
    ROPEWALK_CACHE=/var/cache/ropewalk \
    HF_HOME=/var/cache/ropewalk/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/ropewalk/inductor \
    TRITON_CACHE_DIR=/var/cache/ropewalk/triton \
    ROPEWALK_HOST=0.0.0.0
# These and /tmp are all that is written.
VOLUME /var/cache/ropewalk
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
# Kubernetes has probes of its own and ignores this. Unwell is what /health says; loading is not.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.getenv('ROPEWALK_PORT', '8000') + '/health', timeout=4)"]
ENTRYPOINT ["ropewalk-entrypoint"]
CMD ["serve"]
LABEL org.opencontainers.image.title="Ropewalk" \
      org.opencontainers.image.description="Inference server that gives every request the positional scaling its length needs" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS cuda
# The NVIDIA container runtime puts the driver in; without a GPU the server does not start, rather than run on the CPU.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ROPEWALK_DEVICE=cuda
COPY --from=install-cuda /opt/ropewalk /opt/ropewalk
COPY --from=install-cuda /usr/share/ropewalk /usr/share/ropewalk

FROM runtime AS cpu
ENV ROPEWALK_DEVICE=cpu
COPY --from=install-cpu /opt/ropewalk /opt/ropewalk
COPY --from=install-cpu /usr/share/ropewalk /usr/share/ropewalk
