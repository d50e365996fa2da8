//! A retry policy, as documents and JSON have it.

use std::sync::LazyLock;

use bson::{Bson, doc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::base::json::extended;

/// The retry policy of a job without a policy.
pub(super) static NO_RETRY: LazyLock<StoredPolicy> =
    LazyLock::new(|| StoredPolicy { class: DEFAULT_POLICY.into(), parameters: doc! {}.into() });
/// Its class.
pub(crate) const DEFAULT_POLICY: &str = "DoNotDoItAgain";

/// A retry policy as stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct StoredPolicy {
    /// Name of the policy.
    pub class: String,
    /// Parameters of the policy.
    #[serde(default)]
    pub parameters: Bson,
}

impl StoredPolicy {
    /// Reads a JSON object. A field that a policy does not have is refused.
    pub(crate) fn of_json(value: Value) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Policy {
            class: String,
            #[serde(default)]
            parameters: Value,
        }
        let Policy { class, parameters } =
            serde_json::from_value(value).map_err(|error| format!(r#"a retry policy is {{"class": …, "parameters": …}}: {error}"#))?;
        Ok(Self { class, parameters: extended(parameters)? })
    }
}

impl From<StoredPolicy> for Bson {
    fn from(policy: StoredPolicy) -> Self {
        Bson::Document(doc! { "class": policy.class, "parameters": policy.parameters })
    }
}

/// For `#[serde(with)]`: in JSON, the parameters are extended JSON.
pub(crate) mod in_json {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer, de::Error as _};
    use serde_json::{Value, json};

    use super::StoredPolicy;
    use crate::base::json::relaxed;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<StoredPolicy>, D::Error> {
        if !from.is_human_readable() {
            return Option::deserialize(from);
        }
        let policy = Option::<Value>::deserialize(from)?;
        policy.map(StoredPolicy::of_json).transpose().map_err(D::Error::custom)
    }

    pub(crate) fn serialize<S: Serializer>(policy: &Option<StoredPolicy>, to: S) -> Result<S::Ok, S::Error> {
        match policy {
            Some(StoredPolicy { class, parameters }) if to.is_human_readable() => {
                json!({ "class": class, "parameters": relaxed(parameters.clone()) }).serialize(to)
            }
            policy => policy.serialize(to),
        }
    }
}
