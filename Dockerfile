# A container that serves a detector, and runs the other commands of the README; git is not needed.
#
#   docker build -t slab_det .      # smaller: --build-arg SLAB_DET_TORCH_INDEX=... (PyTorch's builds for CPUs)
#   docker run -p 127.0.0.1:8000:8000 -v $PWD/FOLDER:/model:ro slab_det    # the folder of slab-det optimize
#   curl --data-binary @photo.jpg http://localhost:8000/detect
#   docker run --init --shm-size=2g slab_det make quickstart
FROM python:3.11-slim
# OpenCV's libraries; make; a compiler for the tests of torch.compile.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgl1 libglib2.0-0 make \
    && rm -rf /var/lib/apt/lists/*
# Another user may serve too, such as the owner of a folder that nobody else can read: docker run --user.
RUN useradd --create-home slab_det && chmod 755 /home/slab_det && mkdir /slab_det && chown slab_det /slab_det
USER slab_det
WORKDIR /slab_det
ARG SLAB_DET_TORCH_INDEX=
ENV SLAB_DET_VENV=/home/slab_det/venv SLAB_DET_TORCH_INDEX=$SLAB_DET_TORCH_INDEX PIP_NO_CACHE_DIR=1
ENV PATH=$SLAB_DET_VENV/bin:$PATH PYTHONPATH=/slab_det PYTHON=/usr/local/bin/python3
# The environment depends on the locks alone: a change of the code does not make it again.
COPY requirements requirements
COPY tools/venv.sh tools/
RUN tools/venv.sh
# numba, which mmdet imports, needs a folder that any user may write, also with docker run --read-only --tmpfs /tmp.
ENV NUMBA_CACHE_DIR=/tmp/numba
COPY --chown=slab_det . .
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://localhost:8000/healthz')"]
CMD ["python", "tools/serve.py", "/model", "--host", "0.0.0.0"]
