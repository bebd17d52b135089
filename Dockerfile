# syntax=docker/dockerfile:1

# Never below 24.18.1: the first 24 with the fix for CVE-2026-58044 (fields dropped, but still framed by).
ARG NODE_VERSION=24.21.0

FROM node:${NODE_VERSION}-bookworm AS build
WORKDIR /app
# Dependencies first: they change less often than the sources. Their install scripts do not run; one
# of them would fetch SQLite as a binary that no lock file pins. It is compiled here instead.
COPY package.json package-lock.json ./
RUN npm ci --ignore-scripts --no-audit --no-fund \
    && cd node_modules/better-sqlite3 \
    && npm_config_nodedir=/usr/local npm run build-release
COPY tsconfig.json ./
COPY src ./src
RUN npm run build
# What runs stays, what it was made of goes: better-sqlite3 loads this one file of its build.
RUN npm prune --omit=dev --no-audit --no-fund \
    && cd node_modules/better-sqlite3 \
    && rm -rf deps src binding.gyp \
    && find build -type f ! -path build/Release/better_sqlite3.node -delete \
    && find build -type d -empty -delete

FROM node:${NODE_VERSION}-bookworm-slim
LABEL org.opencontainers.image.title="fencing-proxy" \
      org.opencontainers.image.description="A sidecar that makes a legacy HTTP API safe from stale lease holders." \
      org.opencontainers.image.licenses="Apache-2.0"
# npm and yarn have no business in a running container.
RUN rm -rf /usr/local/lib/node_modules /usr/local/bin/npm /usr/local/bin/npx /usr/local/bin/corepack /usr/local/bin/yarn /usr/local/bin/yarnpkg /opt/yarn-* \
    && install -d -o 65532 -g 65532 -m 0700 /var/lib/fencing-proxy
WORKDIR /app
COPY package.json LICENSE ./
COPY config ./config
COPY --from=build /app/node_modules ./node_modules
COPY --from=build /app/dist ./dist
# The root file system may be read-only: the marks and SQLite's temporary files are all that is
# written, and a relative path in a configuration ends there, too.
ENV NODE_ENV=production \
    SQLITE_TMPDIR=/var/lib/fencing-proxy
WORKDIR /var/lib/fencing-proxy
USER 65532:65532
# The marks. Without a volume that outlives the container, every takeover is forgotten with it.
VOLUME ["/var/lib/fencing-proxy"]
# The admin port is not among them: it stays on loopback unless FENCING_PROXY_ADMIN says otherwise.
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["node", "-e", "fetch('http://' + (process.env.FENCING_PROXY_ADMIN ?? '127.0.0.1:9901') + '/healthz').then((r) => process.exit(r.ok ? 0 : 1), () => process.exit(1))"]
# A stop waits up to shutdownTimeout (30s) for writes to end; give it longer than that: docker stop -t 40.
ENTRYPOINT ["node", "/app/dist/cli.js"]
CMD ["serve", "--data", "/var/lib/fencing-proxy"]
