# Images of the operator and the trainer:
#   docker build --target operator -t docker.io/trireme/operator:0.1.0 .
#   docker build --target trainer  -t docker.io/trireme/trainer:0.1.0 .
# BASE: Debian 12 or Ubuntu 24.04. PRESET: of the trainer, cpu or cuda.
# PREBUILT: a folder in the context with operator/ and trainer/ as scripts/image_files.sh makes them on the same BASE; nothing is built then.
ARG BASE=debian:12-slim

FROM ${BASE} AS packages
ARG PREBUILT=""
WORKDIR /src
COPY scripts scripts
RUN [ -n "$PREBUILT" ] || { scripts/setup.sh operator && rm -rf /var/lib/apt/lists/*; }

FROM packages AS operator-build
ARG PREBUILT=""
COPY . .
RUN if [ -n "$PREBUILT" ]; then cp -a "$PREBUILT/operator" /out; \
    else scripts/build.sh operator trireme-operator && scripts/image_files.sh operator operator /out; fi

FROM ${BASE} AS operator
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

FROM ${BASE} AS trainer
COPY --from=trainer-build /out/ /
RUN ldconfig
WORKDIR /opt/trireme
USER 65532:65532
CMD ["trireme", "--help"]
