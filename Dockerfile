# docker build -t ropewalk .                             for CPU
# docker build -t ropewalk --build-arg DEVICE=cuda .     for CUDA
FROM python:3.11-slim AS build
ARG DEVICE=cpu
WORKDIR /src
RUN python -m venv /opt/ropewalk
COPY constraints.txt ./
# Without an index of its own, pip takes the CUDA build of torch, several GB.
RUN if [ "$DEVICE" = cuda ]; then index=; else index="--index-url https://download.pytorch.org/whl/cpu"; fi; \
    /opt/ropewalk/bin/pip install --no-cache-dir $index "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY model_patches model_patches
COPY service service
RUN /opt/ropewalk/bin/pip install --no-cache-dir --constraint constraints.txt .
ENV ROPEWALK_CACHE=/var/cache/ropewalk
RUN /opt/ropewalk/bin/ropewalk fetch-default

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home ropewalk
COPY --from=build /opt/ropewalk /opt/ropewalk
COPY --from=build --chown=ropewalk /var/cache/ropewalk /var/cache/ropewalk
ENV PATH=/opt/ropewalk/bin:$PATH \
    ROPEWALK_CACHE=/var/cache/ropewalk \
    HF_HOME=/var/cache/ropewalk/huggingface \
    ROPEWALK_HOST=0.0.0.0
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD python -c "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.getenv(\"ROPEWALK_PORT\", 8000)}/health', timeout=4)"
ENTRYPOINT ["ropewalk"]
CMD ["serve"]
