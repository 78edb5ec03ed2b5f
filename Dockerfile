# syntax=docker/dockerfile:1
# whywait from a wheel built here, in a small image, as a user that is not root. docs/packaging.md tells how it is used.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON}-slim
# Such as --build-arg EXTRAS=engine,sim
ARG EXTRAS=""
COPY --from=build /dist /dist
COPY constraints.txt /dist/
RUN wheel="$(ls /dist/*.whl)" \
 && pip install --no-cache-dir --no-compile -c /dist/constraints.txt "${wheel}${EXTRAS:+[$EXTRAS]}" \
 && rm -rf /dist \
 && useradd --create-home --uid 10001 whywait \
 && install -d -o whywait /runs
ENV PYTHONUNBUFFERED=1
USER 10001
WORKDIR /runs
ENTRYPOINT ["whywait"]
CMD ["--help"]
