# Stands in for the official image of PostgreSQL where no registry of images can be reached.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 postgres \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends postgresql postgresql-client \
 && rm -rf /var/lib/apt/lists/*
USER 999:999
