//! Arrows between rooms run down. A room is a folder or a file directly in the `src` of a crate, and the same inside of each folder. No
//! circle leads from a room back to it, and in `common` a room uses only those above it in the list of `lib.rs`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
};

use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};
use syn::visit::{self, Visit};

use crate::tidy::root;

/// The path of a module or an item inside of its crate.
type Way = Vec<String>;

/// What the files of a crate name.
#[derive(Default)]
struct Crate {
    modules: BTreeSet<Way>,
    /// Who names what.
    names: Vec<(Way, Way)>,
    /// What a module exports under a name, and where that is.
    exports: HashMap<Way, Way>,
}

/// Reads one file. Tests may name what they like.
struct Reader<'a> {
    of: &'a mut Crate,
    file: Way,
    /// The module around the code that is read: the file, and modules inside of it.
    module: Way,
}

impl Reader<'_> {
    fn absolute(&self, way: &[String]) -> Option<Way> {
        let mut from = self.module.clone();
        let mut rest = way;
        while let [first, others @ ..] = rest {
            match first.as_str() {
                "crate" => from.clear(),
                "super" => drop(from.pop()),
                "self" => {}
                _ => break,
            }
            rest = others;
        }
        let is_ours = rest.len() < way.len();
        is_ours.then(|| [from.as_slice(), rest].concat())
    }

    fn named(&mut self, way: &[String]) {
        if let Some(way) = self.absolute(way) {
            self.of.names.push((self.file.clone(), way));
        }
    }

    fn used(&mut self, tree: &syn::UseTree, above: &mut Way, is_export: bool) {
        match tree {
            syn::UseTree::Path(path) => {
                above.push(path.ident.to_string());
                self.used(&path.tree, above, is_export);
                above.pop();
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.used(tree, above, is_export)),
            syn::UseTree::Glob(_) => self.named(above),
            syn::UseTree::Name(syn::UseName { ident }) => self.one(ident, ident, above, is_export),
            syn::UseTree::Rename(syn::UseRename { ident, rename, .. }) => self.one(ident, rename, above, is_export),
        }
    }

    fn one(&mut self, ident: &syn::Ident, name: &syn::Ident, above: &[String], is_export: bool) {
        let way: Way = above.iter().cloned().chain((ident != "self").then(|| ident.to_string())).collect();
        self.named(&way);
        if let Some(to) = self.absolute(&way).filter(|_| is_export) {
            self.of.exports.insert([self.module.as_slice(), &[name.to_string()]].concat(), to);
        }
    }
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item_mod(&mut self, module: &'a syn::ItemMod) {
        let is_test = module.attrs.iter().any(|attribute| attribute.path().is_ident("cfg") && quoted(attribute).contains("test"));
        if module.content.is_some() && !is_test {
            self.module.push(module.ident.to_string());
            visit::visit_item_mod(self, module);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.used(&item.tree, &mut Vec::new(), !matches!(item.vis, syn::Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.named(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Way>());
        visit::visit_path(self, path);
    }

    /// The contents of a macro are no syntax tree, and the paths in it are words.
    fn visit_macro(&mut self, call: &'a syn::Macro) {
        let text = call.tokens.to_string().replace(" :: ", "::");
        for word in text.split(|letter: char| !letter.is_alphanumeric() && letter != '_' && letter != ':') {
            self.named(&word.split("::").map(str::to_owned).collect::<Way>());
        }
    }
}

fn quoted(attribute: &syn::Attribute) -> String {
    attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default()
}

impl Crate {
    fn read(src: &Path) -> Self {
        let mut this = Self::default();
        for (file, text) in files(src) {
            this.modules.insert(file.clone());
            let tree = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"));
            Reader { of: &mut this, module: file.clone(), file }.visit_file(&tree);
        }
        this
    }

    /// The file that has what this way names.
    fn home(&self, way: &[String], hops: usize) -> Way {
        let module = (0..=way.len()).rev().map(|length| &way[..length]).find(|start| self.modules.contains(*start)).unwrap_or_default();
        let item = way.get(..module.len() + 1).and_then(|item| self.exports.get(item));
        match item {
            Some(to) if hops > 0 => self.home(&[to.as_slice(), &way[module.len() + 1..]].concat(), hops - 1),
            Some(_) | None => module.to_vec(),
        }
    }

    /// Which room uses which: the rooms directly inside of `within`. A folder and the files in it are not two rooms.
    fn arrows(&self, within: &[String]) -> BTreeSet<(String, String)> {
        let room = |way: &Way| way.strip_prefix(within).and_then(|rest| rest.first()).cloned();
        let arrows = self.names.iter().filter_map(|(from, to)| Some((room(from)?, room(&self.home(to, 8))?)));
        arrows.filter(|(from, to)| from != to).collect()
    }
}

/// The files of a crate with the paths of their modules. A `main.rs` is another crate.
fn files(src: &Path) -> BTreeMap<Way, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![src.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("main.rs") {
            let way = path.strip_prefix(src).unwrap().with_extension("");
            let mut way: Way = way.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            way.pop_if(|last| last == "mod" || last == "lib");
            found.insert(way, fs::read_to_string(&path).unwrap());
        }
    }
    found
}

#[test]
fn no_circle_leads_from_a_room_back_to_it() {
    let mut circles = Vec::new();
    for krate in ["common", "worker", "worker/testing", "recruiter", "recruiter/dev", "cleaner"] {
        let read = Crate::read(&root().join(krate).join("src"));
        assert!(read.names.len() > 10, "{krate}: nothing was read");
        let folders: BTreeSet<&[String]> = read.modules.iter().filter_map(|way| Some(way.split_last()?.1)).collect();
        for within in folders {
            let arrows = read.arrows(within);
            let graph: DiGraphMap<&str, ()> = arrows.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
            for circle in tarjan_scc(&graph).into_iter().filter(|rooms| rooms.len() > 1) {
                circles.push(format!("{krate}/{}: {}", within.concat(), circle.join(", ")));
            }
        }
    }
    assert!(circles.is_empty(), "{circles:#?}");
}

#[test]
fn a_room_of_common_uses_only_those_above_it_in_the_list() {
    let src = root().join("common/src");
    let list = fs::read_to_string(src.join("lib.rs")).unwrap();
    let rooms: Vec<&str> = list.lines().filter_map(|line| line.strip_prefix("//! | ")?.split('`').nth(1)).collect();
    let place =
        |room: &str| rooms.iter().position(|listed| *listed == room).unwrap_or_else(|| panic!("{room} is not in the list of lib.rs"));
    let up: Vec<_> = Crate::read(&src).arrows(&[]).into_iter().filter(|(from, to)| place(from) < place(to)).collect();
    assert!(up.is_empty(), "{up:?}");
}
