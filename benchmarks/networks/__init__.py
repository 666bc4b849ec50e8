"""Networks for measurements that do not ship with the package: architectures, weights in pieces, loaders."""
