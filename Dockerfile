# docker build -t scalelab . ; docker run --gpus all --shm-size 16g scalelab doctor
# For bytes that stay the same, give the base by digest: --build-arg BASE=python@sha256:...
# The lock itself can be held to a hash: --build-arg LOCK_SHA256=$(sha256sum constraints.txt | cut -d' ' -f1)
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG LOCK_SHA256=
ARG TORCH_INDEX=
WORKDIR /opt/scalelab
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY scalelab ./scalelab
RUN test -z "${LOCK_SHA256}" || echo "${LOCK_SHA256}  constraints.txt" | sha256sum --check --strict
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} '.[deploy,monitor]'
# What this image was built with; the trainer and `scalelab doctor` compare it with what they find at the start.
RUN mkdir -p /etc/scalelab && python -c 'from scalelab.core.machine import environment_hash; print(environment_hash())' > /etc/scalelab/environment
RUN useradd --create-home --uid 1000 scalelab
USER scalelab
WORKDIR /home/scalelab
ENTRYPOINT ["scalelab"]
CMD ["--help"]
