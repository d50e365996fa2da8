//! The stylesheet, the script and the icon of the pages: parts of this program, so that no other server is asked for anything.

use std::sync::LazyLock;

use axum::{
    extract::Path,
    http::{
        StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use sha2::{Digest as _, Sha256};

/// A file of the pages.
struct Asset {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const ASSETS: [Asset; 3] = [
    Asset { name: "style.css", content_type: "text/css; charset=utf-8", text: include_str!("../../../templates/style.css") },
    Asset { name: "script.js", content_type: "text/javascript; charset=utf-8", text: include_str!("../../../templates/script.js") },
    Asset { name: "icon.svg", content_type: "image/svg+xml", text: include_str!("../../../templates/icon.svg") },
];

/// The paths of the stylesheet, the script and the icon. They name the contents, so that a browser keeps them until they change.
pub(super) static PATHS: LazyLock<[String; 3]> = LazyLock::new(|| {
    ASSETS.map(|asset| {
        let hash = hex::encode(Sha256::digest(asset.text));
        format!("/assets/{}/{}", &hash[..16], asset.name)
    })
});

/// Answers a request for a file of this release.
pub(super) async fn serve(Path((hash, name)): Path<(String, String)>) -> Response {
    let wanted = format!("/assets/{hash}/{name}");
    let Some((asset, _)) = ASSETS.iter().zip(PATHS.iter()).find(|(_, path)| **path == wanted) else {
        return (StatusCode::NOT_FOUND, "this release has no such file").into_response();
    };
    let headers = [(CONTENT_TYPE, asset.content_type), (CACHE_CONTROL, "public, max-age=31536000, immutable")];
    (headers, asset.text).into_response()
}
