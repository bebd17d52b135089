# syntax=docker/dockerfile:1

# 24.18.1 is the first 24 with the fix for CVE-2026-58044 (fields dropped, but still framed by).
FROM node:24.18.1-bookworm AS build
WORKDIR /app
# Dependencies first: they change less often than the sources. SQLite is compiled here.
COPY package.json package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY tsconfig.json ./
COPY src ./src
RUN npm run build && npm prune --omit=dev --no-audit --no-fund && rm -rf node_modules/better-sqlite3/deps node_modules/better-sqlite3/src node_modules/better-sqlite3/build/Release/obj* node_modules/better-sqlite3/build/Release/test_extension.node

FROM node:24.18.1-bookworm-slim
LABEL org.opencontainers.image.title="fencing-proxy" \
      org.opencontainers.image.description="A sidecar that makes a legacy HTTP API safe from stale lease holders." \
      org.opencontainers.image.licenses="Apache-2.0"
ENV NODE_ENV=production
WORKDIR /app
COPY --from=build /app/package.json ./
COPY --from=build /app/node_modules ./node_modules
COPY --from=build /app/dist ./dist
COPY config ./config
# npm and yarn have no business in a running container.
RUN rm -rf /usr/local/lib/node_modules /usr/local/bin/npm /usr/local/bin/npx /usr/local/bin/corepack /opt/yarn* /usr/local/bin/yarn* \
    && install -d -o 65532 -g 65532 -m 0700 /var/lib/fencing-proxy
USER 65532:65532
# The marks. Without a volume that outlives the container, every takeover is forgotten with it.
VOLUME ["/var/lib/fencing-proxy"]
EXPOSE 8080 9901
# Nothing else is written: run it with a read-only root file system.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["node", "-e", "fetch('http://127.0.0.1:9901/healthz').then((r) => process.exit(r.ok ? 0 : 1), () => process.exit(1))"]
ENTRYPOINT ["node", "/app/dist/cli.js"]
CMD ["serve", "--data", "/var/lib/fencing-proxy"]
