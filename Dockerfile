# Both commands of the README: docker build -t slab_det . && docker run --shm-size=2g slab_det
FROM python:3.11-slim
# OpenCV's libraries; make; a compiler for the tests of torch.compile.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgl1 libglib2.0-0 make
WORKDIR /slab_det
# The environment depends on the lock alone: a change of the code does not make it again.
COPY requirements requirements
COPY tools/venv.sh tools/
RUN tools/venv.sh
COPY . .
CMD ["sh", "-c", "make quickstart && make test"]
