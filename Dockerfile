# Images of the operator and the trainer:
#   docker build --target operator -t docker.io/trireme/operator:0.1.0 .
#   docker build --target trainer  -t docker.io/trireme/trainer:0.1.0-cpu .
#   docker build --target trainer  -t docker.io/trireme/trainer:0.1.0-cuda --build-arg PRESET=cuda .
# The operator is for amd64 and arm64, the trainer (LibTorch's wheel) for amd64:
#   docker buildx build --platform linux/amd64,linux/arm64 --target operator -t ... --push .
# There the build runs emulated. By a cross compiler, and tried by qemu (make images-arm64, which makes this folder):
#   docker buildx build --platform linux/arm64 --build-arg PREBUILT=build/image/arm64 --target operator -t ... --push .
# BASE: Debian 12 or Ubuntu 24.04. BASE_DIGEST: sha256:... of it (docker buildx imagetools inspect debian:12-slim); with
#   RELEASE=1 a base without one is refused:
#   docker build --build-arg RELEASE=1 --build-arg BASE_DIGEST=sha256:... --target operator ...
# PRESET: of the trainer, cpu or cuda.
# PREBUILT: a folder in the context with operator/ and trainer/ as scripts/image_files.sh makes them on the same BASE;
#   nothing is built then.
# What an image holds over its base is in its /usr/share/doc/trireme/sbom.cdx.json (scripts/sbom.py).
ARG BASE=debian:12-slim
ARG BASE_DIGEST=""

FROM ${BASE}${BASE_DIGEST:+@$BASE_DIGEST} AS base
ARG BASE
ARG BASE_DIGEST
LABEL org.opencontainers.image.base.name="$BASE" org.opencontainers.image.base.digest="$BASE_DIGEST"

FROM base AS packages
ARG BASE
ARG BASE_DIGEST
ARG RELEASE=""
ARG PREBUILT=""
WORKDIR /src
COPY scripts scripts
RUN [ -z "$RELEASE" ] || scripts/check_base.sh "$BASE" "$BASE_DIGEST"
RUN [ -n "$PREBUILT" ] || { scripts/setup.sh operator && rm -rf /var/lib/apt/lists/*; }
ENV IMAGE_BASE=${BASE}${BASE_DIGEST:+@$BASE_DIGEST}

FROM packages AS operator-build
ARG PREBUILT=""
COPY . .
RUN if [ -n "$PREBUILT" ]; then cp -a "$PREBUILT/operator" /out; \
    else scripts/build.sh operator trireme-operator && scripts/image_files.sh operator operator /out; fi

FROM base AS operator
COPY --from=operator-build /out/ /
RUN ldconfig
USER 65532:65532
ENTRYPOINT ["trireme-operator"]

FROM packages AS trainer-build
ARG PREBUILT=""
ARG PRESET=cpu
RUN [ -n "$PREBUILT" ] || { scripts/setup.sh "$PRESET" && rm -rf /var/lib/apt/lists/*; }
COPY . .
RUN if [ -n "$PREBUILT" ]; then cp -a "$PREBUILT/trainer" /out; \
    else scripts/build.sh "$PRESET" trireme && scripts/image_files.sh trainer "$PRESET" /out; fi

FROM base AS trainer
COPY --from=trainer-build /out/ /
RUN ldconfig
WORKDIR /opt/trireme
USER 65532:65532
CMD ["trireme", "--help"]
