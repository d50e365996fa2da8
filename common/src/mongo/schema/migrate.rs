//! What a start of this release changes in the schema of a database, for `recruiter migrate`. It writes nothing.

use bson::RawDocumentBuf;

use super::{
    SCHEMA_VERSION,
    collections::wanted,
    kind::Kind,
    ownership::examine,
    survey::{IndexFault, survey},
    version,
};
use crate::{
    base::words,
    mongo::{Client, StoreError, call},
};

words! {
    /// A part of the schema.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Part {
        /// The version that is noted.
        Version = "version",
        /// A whole collection.
        Collection = "collection",
        /// What documents of a collection must look like.
        Validator = "validator",
        /// An index of a collection.
        Index = "index",
    }

    /// Its name, in JSON.
    fn name;
}

words! {
    /// What happens to it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Action {
        /// It is missing.
        Make = "make",
        /// In place of what is there.
        Replace = "replace",
        /// By the first leading recruiter of this release: until then an earlier release may need it.
        Drop = "drop",
    }

    /// Its name, in JSON.
    fn name;
}

/// A change of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is changed.
    pub part: Part,
    /// What happens to it.
    pub action: Action,
    /// The collection, with the prefix of the client.
    pub collection: String,
    /// The index; of a version, that before and that after.
    pub name: Option<String>,
    /// Estimated number of documents in the collection.
    pub documents: u64,
}

impl Change {
    /// Whether it is the same change, however many documents there are.
    pub fn is(&self, other: &Self) -> bool {
        (self.part, self.action, &self.collection, &self.name) == (other.part, other.action, &other.collection, &other.name)
    }
}

/// The changes that a start would make.
pub(crate) async fn changes(client: &Client) -> Result<Vec<Change>, StoreError> {
    let (found, version, surveyed) = (examine(client).await?, version(client).await?, survey(client).await?);
    let is_newer = version > SCHEMA_VERSION;
    let mut changes = Vec::new();
    let mut add = |part, action, collection: &str, name: Option<String>| {
        changes.push(Change { part, action, collection: collection.to_owned(), name, documents: 0 });
    };
    if version < SCHEMA_VERSION {
        let action = if version == 0 { Action::Make } else { Action::Replace };
        add(Part::Version, action, &client.named("metadata"), Some(format!("{version} to {SCHEMA_VERSION}")));
    }
    for name in wanted(client, &found, None).await? {
        match (found.iter().find(|found| found.name == name), Kind::of(&name)) {
            (None, _) => add(Part::Collection, Action::Make, &client.named(&name), None),
            (Some(found), Some(kind)) if kind.is_met_by(found) => {}
            (Some(_), Some(Kind::Hints)) => add(Part::Collection, Action::Replace, &client.named(&name), None),
            // Those of a newer release stay.
            (Some(_), _) if is_newer => {}
            (Some(_), _) => add(Part::Validator, Action::Replace, &client.named(&name), None),
        }
    }
    for (collection, name, fault) in surveyed.indexes {
        let action = match fault {
            IndexFault::Missing => Action::Make,
            IndexFault::Different if !is_newer => Action::Replace,
            IndexFault::Outdated if !is_newer => Action::Drop,
            IndexFault::Different | IndexFault::Outdated | IndexFault::Hidden | IndexFault::Foreign => continue,
        };
        add(Part::Index, action, &collection, Some(name));
    }
    for change in &mut changes {
        let collection = client.collection(change.collection.strip_prefix(&*client.prefix).unwrap_or(&change.collection));
        let collection = collection.clone_with_type::<RawDocumentBuf>();
        change.documents = call("count", async move { collection.estimated_document_count().await }).await?;
    }
    Ok(changes)
}
