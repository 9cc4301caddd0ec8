# One image for workers and clients. Build arguments:
#
#   BASE_IMAGE        a Python 3.11 image with `python` on its path
#   TORCH_VERSION     the torch release to install
#   TORCH_INDEX_URL   where its builds are: .../whl/cpu, .../whl/cu128, ...
#   PIP_ARGS          further arguments for pip. Wheels in the folder wheels/ of the build context are found in /wheels:
#                     PIP_ARGS="--no-index --find-links /wheels" builds without a network (scripts/wheels fills it).

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/gradwire
ENV PATH=/opt/gradwire/bin:$PATH

WORKDIR /src
# The pattern lets wheels/ be absent; its contents land in /wheels.
COPY constraints.txt wheel[s] /wheels/
COPY pyproject.toml ./
COPY scripts/requirements scripts/
# Dependencies first: this layer stays when only gradwire's code changes.
RUN python scripts/requirements demo > requirements.txt \
    && sed "s/^torch==.*/torch==${TORCH_VERSION}/" /wheels/constraints.txt > constraints.txt \
    && pip install --extra-index-url "${TORCH_INDEX_URL}" ${PIP_ARGS} -c constraints.txt -r requirements.txt

COPY README.md LICENSE hatch_build.py ./
COPY native native
COPY client client
COPY server server
# The image has no compiler: pip brings the one of the package ziglang for this step.
RUN pip install ${PIP_ARGS} --no-deps .


FROM ${BASE_IMAGE}
# A new volume takes over the owner of the folder that it is mounted on: without one here, it would be root's.
RUN useradd --create-home --uid 10001 gradwire \
    && install --directory --owner gradwire --group gradwire /var/lib/gradwire
COPY --from=build /opt/gradwire /opt/gradwire
ENV PATH=/opt/gradwire/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app/examples
COPY examples .
USER gradwire
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-m", "gradwire_server.health", "127.0.0.1:50051"]
CMD ["gradwire-server", "serve", "demo_model", "--bind", "0.0.0.0:50051"]
