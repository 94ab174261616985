#!/usr/bin/env python3
"""The bill of materials of an image: what is in it over its base, from whom, under which licence (CycloneDX 1.5 JSON).

  scripts/sbom.py make operator|trainer PRESET ROOT   writes ROOT/usr/share/doc/trireme/sbom.cdx.json
  scripts/sbom.py check ROOT                          ROOT against it, on any machine
  scripts/sbom.py check-image ROOT                    the same of a mounted image: what the base holds is passed over

ROOT is a folder of scripts/image_files.sh. `make` believes no name: a file belongs to the Debian package or the wheel
whose own list of sums (dpkg's md5sums, the wheel's RECORD) has its content; the rest must be ours, by path. A file of
nobody, or of two, is an error. Beside them stands what is compiled into the program: header packages, crates, the Rust
library, third_party. `check` needs nothing of the build machine: every file of ROOT is in exactly one component with
its SHA-256, no ELF file is ours but the program, every component has a version, a licence, and a purl or a hash,
packages and wheels have their metadata and licence text in ROOT.
"""
import base64
import collections
import csv
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse
import uuid

SOURCE = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = "usr/share/doc/trireme"
SBOM = f"{DOCUMENTS}/sbom.cdx.json"
LIBRARIES = "usr/local/lib/trireme"
PROGRAMS = {"operator": "trireme-operator", "trainer": "trireme"}
STATUS = "var/lib/dpkg/status.d"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
OURS = ("usr/local/bin/", "opt/trireme/", "etc/ld.so.conf.d/trireme.conf", f"{DOCUMENTS}/LICENSE")
VENDORED = {"operator": ("httplib",), "trainer": ("httplib", "uplot")}
VENDORED_PURL = {"cpp-httplib": "pkg:github/yhirose/cpp-httplib@v{}", "uPlot": "pkg:npm/uplot@{}"}


class Refused(Exception):
    pass


def digest(path, algorithm="sha256"):
    made = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            made.update(chunk)
    return made.hexdigest()


def files_of(root):
    """Regular files below root as POSIX paths, without the bill itself; links must end at one of them."""
    found = []
    for folder, folders, names in os.walk(root):
        for name in sorted(names + folders):
            path = pathlib.Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                target = pathlib.Path(os.path.realpath(path))
                if not target.exists() or root not in target.parents:
                    raise Refused(f"{relative}: a link to {os.readlink(path)}, which is not in the image")
            elif path.is_file():
                found.append(relative)
            elif not path.is_dir():
                raise Refused(f"{relative}: neither a file, a folder nor a link")
    return sorted(set(found) - {SBOM})


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def stanza(text):
    fields = {}
    for line in text.splitlines():
        if line[:1] not in ("", " ", "\t"):
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def quote(text):
    return urllib.parse.quote(text, safe="~.-_")


def named(licences):
    return [{"license": {"name": name}} for name in licences]


def component(name, version, purl, licences, kind="library", hashes=(), properties=()):
    made = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl, "licenses": licences}
    if hashes:
        made["hashes"] = [{"alg": "SHA-256", "content": content} for content in hashes]
    if properties:
        made["properties"] = [{"name": f"trireme:{key}", "value": value} for key, value in properties]
    return made


# ---- what is in a folder ----

def licences_of_copyright(path):
    """Short names of a machine-readable debian/copyright; else where to read it."""
    text = path.read_text(errors="replace")
    if "copyright-format/1.0" not in text.partition("\n\n")[0]:
        return named([f"see /usr/share/doc/{path.parent.name}/copyright"])
    return named(sorted({line.partition(":")[2].strip() for line in text.splitlines()
                         if line.startswith("License:") and line.partition(":")[2].strip()}))


def os_release():
    lines = pathlib.Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def debian(root, claims, dpkg):
    """Components of ROOT's status.d, and who has which content: {md5: bom-ref}. claims: whose metadata lies where.
    dpkg: the database of the packages."""
    system = os_release()
    components, owners = [], collections.defaultdict(set)
    for path in sorted((root / STATUS).glob("*")):
        fields = stanza(path.read_text())
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        purl = (f"pkg:deb/{system['ID']}/{quote(name)}@{quote(version)}"
                f"?arch={architecture}&distro={system['ID']}-{system['VERSION_ID']}")
        copyright_file = root / "usr/share/doc" / name / "copyright"
        if not copyright_file.exists():
            raise Refused(f"{copyright_file.relative_to(root)} is missing: the licence of {name}")
        claims.update({f"{STATUS}/{name}": purl, f"usr/share/doc/{name}/": purl})
        if name == "ca-certificates":
            claims[CERTIFICATES] = purl
        properties = [("linkage", "compiled in")] if name.endswith("-dev") else []
        components.append(component(name, version, purl, licences_of_copyright(copyright_file), properties=properties))
        sums = [dpkg / f"info/{name}{suffix}.md5sums" for suffix in ("", ":" + architecture)]
        for line in "".join(file.read_text() for file in sums if file.exists()).splitlines():
            owners[line.split("  ", 1)[0]].add(purl)
    return components, owners


def pins(flavour):
    """{name: (version, SHA-256)} of the wheels that the set-up takes."""
    found = {}
    for file in (f"{flavour}.txt", "flashinfer.txt") if flavour == "cuda" else (f"{flavour}.txt",):
        for name, version, content in re.findall(r"^([^#=\s]+)==(\S+) --hash=sha256:([0-9a-f]{64})$",
                                                 (SOURCE / "scripts/wheels" / file).read_text(), re.M):
            found[re.sub(r"[-_.]+", "-", name).lower()] = (version, content)
    return found


def wheels(root, flavour, claims):
    """Components of the dist-info folders in ROOT, and who has which content: {SHA-256: bom-ref}."""
    components, owners = [], collections.defaultdict(set)
    for folder in sorted((root / LIBRARIES).glob("*.dist-info")):
        fields = stanza((folder / "METADATA").read_text(errors="replace").partition("\n\n")[0])
        name, version = fields["Name"].lower(), fields["Version"]
        pinned = pins(flavour).get(re.sub(r"[-_.]+", "-", name))
        if pinned is None or pinned[0] != version:
            raise Refused(f"{folder.name}: scripts/wheels/{flavour}.txt has no {name} {version}")
        purl = f"pkg:pypi/{quote(re.sub(r'[-_.]+', '-', name))}@{quote(version)}"
        claims[f"{LIBRARIES}/{folder.name}/"] = purl
        licence = fields.get("License-Expression") or fields.get("License") or "see licenses/"
        compiled_in = [("linkage", "compiled in")] if name.startswith("flashinfer") else []
        components.append(component(name, version, purl, named([licence]), hashes=[pinned[1]], properties=compiled_in))
        record = next((SOURCE / "build/deps" / part / folder.name / "RECORD" for part in (flavour, "flashinfer")
                       if (SOURCE / "build/deps" / part / folder.name / "RECORD").exists()), None)
        for row in csv.reader(record.open(newline="")) if record else ():
            if row[1].startswith("sha256="):
                content = base64.urlsafe_b64decode(row[1][7:] + "=" * (-len(row[1][7:]) % 4)).hex()
                owners[content].add(purl)
    return components, owners


def cargo(*arguments):
    command = ["cargo", *arguments]
    done = subprocess.run(command, cwd=SOURCE / "trainer/tokenizer/rust", capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def copy_texts(source, root, folder, names=r"(?i)(licen[cs]e|copying|copyright|notice|unlicense)"):
    """Licences and notices of `source`, to ROOT; returns the prefix of where they are."""
    target = root / DOCUMENTS / folder
    for text in sorted(source.iterdir()) if source.is_dir() else ():
        if re.match(names, text.name) and text.is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, target / text.name)
    return f"{DOCUMENTS}/{folder}/"


def crates(root, claims):
    """Crates that the program holds (no build or test dependencies), Rust's own library; licences go to ROOT."""
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = re.search(r"^host: (\S+)$", version, re.M).group(1)
    release = re.search(r"^release: (\S+)$", version, re.M).group(1)
    data = json.loads(cargo("metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", host))
    lock = (SOURCE / "trainer/tokenizer/rust/Cargo.lock").read_text()
    sums = {(name, number): content for name, number, content in re.findall(
        r'name = "([^"]+)"\nversion = "([^"]+)"\nsource = "[^"]+"\nchecksum = "([0-9a-f]{64})"', lock)}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    reached, waiting = set(), [data["resolve"]["root"]]
    while waiting:
        identity = waiting.pop()
        if identity in reached:
            continue
        reached.add(identity)
        waiting += [edge["pkg"] for edge in nodes[identity]["deps"]
                    if any(kind["kind"] is None for kind in edge["dep_kinds"])]
    compiled_in = [("linkage", "compiled in")]
    library = f"pkg:generic/rust-std@{quote(release)}"
    licence = [{"expression": "MIT OR Apache-2.0"}]
    components = [component("rust-std", release, library, licence, properties=compiled_in)]
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    texts = copy_texts(pathlib.Path(sysroot, "share/doc/rust"), root, f"crates/rust-std-{release}", "COPYRIGHT-library")
    claims[texts] = library
    for package in sorted(data["packages"], key=lambda p: (p["name"], p["version"])):
        if package["id"] not in reached or package["id"] == data["resolve"]["root"]:
            continue
        name, number = package["name"], package["version"]
        if not package["license"]:
            raise Refused(f"crate {name} {number} names no licence")
        purl = f"pkg:cargo/{quote(name)}@{quote(number)}"
        claims[copy_texts(pathlib.Path(package["manifest_path"]).parent, root, f"crates/{name}-{number}")] = purl
        expression = re.sub(r"\s*/\s*", " OR ", package["license"])
        components.append(component(name, number, purl, [{"expression": expression}], hashes=[sums[name, number]],
                                    properties=compiled_in))
    return components


def vendored(root, kind, claims):
    """Of third_party: what each README says of itself, with the sums of its files as they are; licences go to ROOT."""
    components = []
    for folder in VENDORED[kind]:
        source = SOURCE / "third_party" / folder
        text = (source / "README.md").read_text()
        title = re.match(r"(\S+) (\d\S*) \(([^)]+)\)", text)
        stated = re.findall(r"SHA-256 of\s+`([^`]+)`:\s+`([0-9a-f]{64})`", text)
        if not title or not stated:
            raise Refused(f"third_party/{folder}/README.md does not begin with NAME VERSION (LICENCE), or states no "
                          "SHA-256")
        for file, content in stated:
            if digest(source / file) != content:
                raise Refused(f"third_party/{folder}/{file} is not what its README says (SHA-256)")
        name, version, licence = title.groups()
        purl = VENDORED_PURL[name].format(version)
        claims[copy_texts(source, root, f"third_party/{folder}")] = purl
        components.append(component(name, version, purl, [{"license": {"id": licence}}],
                                    hashes=[content for _, content in stated],
                                    properties=[("linkage", "compiled in"), ("folder", f"third_party/{folder}")]))
    return components


def make(kind, preset, root):
    program = PROGRAMS[kind]
    version = re.search(r"project\(trireme VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
    claims, by_sha256 = {}, {}
    of_sysroot = SOURCE / "build/deps/arm64" if preset.endswith("-arm64") else pathlib.Path("/")
    components, by_md5 = debian(root, claims, of_sysroot / "var/lib/dpkg")
    components += vendored(root, kind, claims)
    if kind == "trainer":
        taken, by_sha256 = wheels(root, preset, claims)
        components += taken + crates(root, claims)
    shutil.copyfile(SOURCE / "LICENSE", root / f"{DOCUMENTS}/LICENSE")
    own = component(program, version, f"pkg:generic/{program}@{version}", [{"license": {"id": "Apache-2.0"}}],
                    kind="application")
    held, problems = collections.defaultdict(list), []
    for path in files_of(root):
        file, content = root / path, digest(root / path)
        elf = is_elf(file)
        owners = {purl for prefix, purl in claims.items()
                  if not elf and (path == prefix or prefix[-1] == "/" and path.startswith(prefix))}
        if not owners:
            owners = by_md5.get(digest(file, "md5"), set()) | by_sha256.get(content, set())
        if not owners and path.startswith(OURS) and (not elf or path == f"usr/local/bin/{program}"):
            owners = {own["purl"]}
        if len(owners) != 1:
            problems.append(f"{path}: is of " + (" and ".join(sorted(owners)) or "no package or wheel, and not ours"))
            continue
        held[owners.pop()].append({"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": content}]})
    if problems:
        raise Refused("\n".join(problems))
    for one in [own, *components]:
        if held[one["purl"]]:
            one["components"] = held[one["purl"]]
    system = os_release()
    properties = [{"name": "trireme:built-on", "value": f"{system['ID']} {system['VERSION_ID']}"}]
    if os.environ.get("IMAGE_BASE"):
        properties.append({"name": "trireme:base", "value": os.environ["IMAGE_BASE"]})
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": own, "properties": properties}, "components": components,
            "dependencies": [{"ref": own["purl"], "dependsOn": [one["purl"] for one in components]}]}
    # The same content has the same number.
    bill["serialNumber"] = "urn:uuid:" + str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True)))
    (root / SBOM).write_text(json.dumps(bill, indent=1) + "\n")
    return len(components)


# ---- whether a folder is what its bill says ----

def problems_of_component(one):
    name = one.get("name") or "?"
    for key in ("type", "bom-ref", "name", "version"):
        if not isinstance(one.get(key), str) or not one[key]:
            yield f"component {name}: no {key}"
    if one.get("type") not in ("application", "library"):
        yield f"component {name}: type {one.get('type')}"
    licences = one.get("licenses") or []
    texts = [one_licence.get("expression") or (one_licence.get("license") or {}).get("id")
             or (one_licence.get("license") or {}).get("name") for one_licence in licences]
    if not texts or not all(texts):
        yield f"component {name}: no licence"
    hashes = one.get("hashes") or []
    if not all(h.get("alg") == "SHA-256" and re.fullmatch("[0-9a-f]{64}", h.get("content", "")) for h in hashes):
        yield f"component {name}: a hash that is no SHA-256"
    purl = one.get("purl")
    if not hashes and not purl:
        yield f"component {name}: neither a purl nor a hash"
    if purl and not re.fullmatch(r"pkg:[a-z]+(/[^/@?]+)+@[^@?]+(\?[^?]+)?", purl):
        yield f"component {name}: {purl} is no package URL"
    if str(purl).startswith(("pkg:pypi/", "pkg:cargo/")) and not hashes:
        yield f"component {name}: no hash of what was fetched"


def problems_of_metadata(one, root):
    """The texts and records that go with what is in the image."""
    name, version, purl = str(one.get("name")), str(one.get("version")), str(one.get("purl"))
    if purl.startswith("pkg:deb/"):
        if not (root / "usr/share/doc" / name / "copyright").exists():
            yield f"usr/share/doc/{name}/copyright is missing"
        status = root / STATUS / name
        fields = stanza(status.read_text()) if status.exists() else {}
        if (fields.get("Package"), fields.get("Version")) != (name, version):
            yield f"{STATUS}/{name} is missing or of another version than {version}"
    if purl.startswith("pkg:pypi/"):
        held = [file.get("name", "") for file in one.get("components", ())]
        for part in ("/METADATA", "/licenses/"):
            if not any(".dist-info" + part in path for path in held):
                yield f"component {name}: the image has no {part[1:].rstrip('/')} of the wheel"


def check(root, over_base=False):
    try:
        bill = json.loads((root / SBOM).read_text())
    except FileNotFoundError:
        raise Refused(f"{SBOM} is missing") from None
    except ValueError as error:
        raise Refused(f"{SBOM} is no JSON: {error}") from None
    problems = []
    if (bill.get("bomFormat"), bill.get("specVersion")) != ("CycloneDX", "1.5"):
        problems.append("not CycloneDX 1.5")
    if not re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(bill.get("serialNumber"))):
        problems.append("no serial number")
    own = bill.get("metadata", {}).get("component", {})
    every = [own, *bill.get("components", ())]
    references = collections.Counter(one.get("bom-ref") for one in every)
    problems += [f"{reference}: {count} components" for reference, count in references.items() if count > 1]
    for edge in bill.get("dependencies", ()):
        problems += [f"dependency on {to}, which is no component"
                     for to in [edge.get("ref"), *edge.get("dependsOn", ())] if to not in references]
    held = collections.defaultdict(list)
    for one in every:
        problems += problems_of_component(one)
        problems += problems_of_metadata(one, root)
        for file in one.get("components", ()):
            held[file.get("name")].append((one, (file.get("hashes") or [{}])[0].get("content")))
    present = [path for path in held if (root / path).is_file()] if over_base else files_of(root)
    problems += [f"{path}: in the bill, not in the image" for path in sorted(set(held) - set(present))]
    elf = 0
    for path in present:
        owners = held.get(path, [])
        elf += is_elf(root / path)
        if len(owners) != 1:
            problems.append(f"{path}: " + (f"of {len(owners)} components" if owners else "of no component"))
            continue
        if owners[0][1] != digest(root / path):
            problems.append(f"{path}: has another content than the bill says")
        program = path in [f"usr/local/bin/{name}" for name in PROGRAMS.values()]
        if is_elf(root / path) and owners[0][0] is own and not program:
            problems.append(f"{path}: a program that nobody but us should own")
    if problems:
        raise Refused("\n".join(problems))
    return len(every), len(present), elf


def main(arguments):
    root = pathlib.Path(arguments[-1]).resolve() if arguments else None
    try:
        if len(arguments) == 4 and arguments[0] == "make" and arguments[1] in PROGRAMS:
            make(arguments[1], arguments[2], root)
        elif len(arguments) != 2 or arguments[0] not in ("check", "check-image"):
            print(__doc__, file=sys.stderr)
            return 2
        components, files, elf = check(root, over_base=arguments[0] == "check-image")
    except Refused as refused:
        for line in str(refused).splitlines()[:20]:
            print(f"error: {line}", file=sys.stderr)
        return 1
    print(f"{root.name}: {components} components, {files} files, {elf} of them ELF: each of exactly one component")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
