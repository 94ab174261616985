"""A small client of the API server, and recorders: every change of a kind, in order, kept from before the test did
anything.

Checks look at recordings and never at what a poll happened to see, so that they do not depend on timing.
"""
import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
import urllib.parse

import yaml


class ApiError(Exception):
    def __init__(self, status, body):
        self.status = status
        try:
            self.message = json.loads(body)["message"]
        except (ValueError, KeyError, TypeError):
            self.message = body[:500]
        super().__init__(f"{status}: {self.message}")


KINDS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "events": "/api/v1",
    "nodes": "/api/v1",
    "secrets": "/api/v1",
    "persistentvolumes": "/api/v1",
    "persistentvolumeclaims": "/api/v1",
    "namespaces": "/api/v1",
    "resourcequotas": "/api/v1",
    "rljobs": "/apis/trireme.dev/v1alpha1",
    "leases": "/apis/coordination.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "deployments": "/apis/apps/v1",
    "workloads": "/apis/scheduling.k8s.io/v1alpha2",
    "podgroups": "/apis/scheduling.k8s.io/v1alpha2",
    "validatingwebhookconfigurations": "/apis/admissionregistration.k8s.io/v1",
    "mutatingwebhookconfigurations": "/apis/admissionregistration.k8s.io/v1",
}
CLUSTER_WIDE = {
    "nodes", "persistentvolumes", "namespaces", "validatingwebhookconfigurations", "mutatingwebhookconfigurations"
}


class Kube:
    def __init__(self, kubeconfig):
        config = yaml.safe_load(open(kubeconfig))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.host = urllib.parse.urlparse(cluster["server"])
        self.context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        with tempfile.NamedTemporaryFile() as cert, tempfile.NamedTemporaryFile() as key:
            cert.write(base64.b64decode(user["client-certificate-data"])), cert.flush()
            key.write(base64.b64decode(user["client-key-data"])), key.flush()
            self.context.load_cert_chain(cert.name, key.name)
        self.local = threading.local()

    def connect(self, timeout=60):
        return http.client.HTTPSConnection(self.host.hostname, self.host.port, context=self.context, timeout=timeout)

    def raw(self, method, path, body=None, content_type="application/json"):
        """Status and text. Reading goes over a connection that is kept, and is asked again over a new one where the
        server has closed it meanwhile; what changes something has a new connection, and is sent once."""
        payload = None if body is None else body if isinstance(body, str) else json.dumps(body)
        kept = getattr(self.local, "connection", None)
        if kept and method != "GET":
            kept.close()
        for connection in ([kept] if kept and method == "GET" else []) + [self.connect()]:
            self.local.connection = connection
            try:
                connection.request(method, path, payload, {"Content-Type": content_type, "Accept": "application/json"})
                response = connection.getresponse()
                return response.status, response.read().decode()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.local.connection = None
                if connection is not kept:
                    raise
        raise AssertionError("unreachable")

    def call(self, method, path, body=None, content_type="application/json"):
        status, text = self.raw(method, path, body, content_type)
        if status >= 300:
            raise ApiError(status, text)
        return json.loads(text) if text else {}

    @staticmethod
    def path(kind, name="", namespace="default"):
        base = KINDS[kind] + ("" if kind in CLUSTER_WIDE or namespace is None else f"/namespaces/{namespace}")
        return f"{base}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind, name, namespace="default"):
        try:
            return self.call("GET", self.path(kind, name, namespace))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind, namespace="default", selector=""):
        query = "?labelSelector=" + urllib.parse.quote(selector) if selector else ""
        return self.call("GET", self.path(kind, "", namespace) + query)["items"]

    def create(self, kind, body, namespace="default"):
        return self.call("POST", self.path(kind, "", namespace), body)

    def merge(self, kind, name, patch, namespace="default", subresource=""):
        path = self.path(kind, name, namespace) + (f"/{subresource}" if subresource else "")
        return self.call("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, kind, name, namespace="default", **options):
        try:
            return self.call("DELETE", self.path(kind, name, namespace),
                             {"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except ApiError as error:
            if error.status != 404:
                raise
            return None


class Recorder:
    """All changes of a kind since its creation: a list of (monotonic time, ADDED|MODIFIED|DELETED, object)."""

    def __init__(self, kube, kind, namespace="default"):
        self.kube, self.kind, self.namespace = kube, kind, namespace
        self.changes = []
        self.gaps = []
        self.condition = threading.Condition()
        listed = kube.call("GET", kube.path(kind, "", namespace))
        for item in listed["items"]:
            self.changes.append((time.monotonic(), "ADDED", item))
        self.version = listed["metadata"]["resourceVersion"]
        self.stopped = False
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self):
        while not self.stopped:
            try:
                self._watch()
            except (OSError, http.client.HTTPException, ValueError, ApiError):
                time.sleep(0.2)

    def _watch(self):
        connection = self.kube.connect(timeout=900)
        query = f"?watch=1&allowWatchBookmarks=true&timeoutSeconds=3600&resourceVersion={self.version}"
        connection.request("GET",
                           self.kube.path(self.kind, "", self.namespace) + query,
                           headers={"Accept": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            response.read()
            raise OSError(response.status)
        for line in response:
            change = json.loads(line)
            if change["type"] == "ERROR":
                connection.close()
                self._list_again(change["object"].get("message", "watch error"))
                return
            self.version = change["object"]["metadata"]["resourceVersion"]
            if change["type"] == "BOOKMARK":
                continue
            with self.condition:
                self.changes.append((time.monotonic(), change["type"], change["object"]))
                self.condition.notify_all()

    def _list_again(self, why):
        """A new API server does not know what its predecessor told: what changed meanwhile is seen as one change for
        each object."""
        listed = self.kube.call("GET", self.kube.path(self.kind, "", self.namespace))
        with self.condition:
            known = {}
            for _, kind, o in self.changes:
                known[o["metadata"]["uid"]] = (kind, o)
            now, present = time.monotonic(), set()
            for o in listed["items"]:
                present.add(o["metadata"]["uid"])
                kind, before = known.get(o["metadata"]["uid"], ("", None))
                if before is None or before["metadata"]["resourceVersion"] != o["metadata"]["resourceVersion"]:
                    self.changes.append((now, "MODIFIED" if before else "ADDED", o))
            for uid, (kind, o) in known.items():
                if uid not in present and kind != "DELETED":
                    self.changes.append((now, "DELETED", o))
            self.version = listed["metadata"]["resourceVersion"]
            self.gaps.append(why)
            self.condition.notify_all()

    def of(self, name):
        """Changes of the objects whose name is `name`, or of all for which it is true."""
        matches = name if callable(name) else lambda o: o["metadata"]["name"] == name
        with self.condition:
            return [c for c in self.changes if matches(c[2])]

    def wait(self, what, predicate, seconds):
        """The first change (time, type, object) for which predicate(type, object) holds, past or future."""
        end = time.monotonic() + seconds
        seen = 0
        with self.condition:
            while True:
                for change in self.changes[seen:]:
                    if predicate(change[1], change[2]):
                        return change
                seen = len(self.changes)
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"{what}: not within {seconds} s")
                self.condition.wait(min(left, 5))
